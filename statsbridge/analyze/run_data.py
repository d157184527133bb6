"""A run with what can be asked of it: rows by module, site and step, profiles along depth, gradient flow."""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ConfigError
from ..log import reader
from ..log.pruning import Steps, Wanted, matches
from ..log.schema import SCHEMAS, SITES
from ..moments import COUNTS, STATISTICS
from . import profiles
from .choices import unknown_choice
from .merging import columns_kept, merge_over
from .profiles import Matrix

_MOST_BYTES = 256 << 20  # of matrices that are kept: a page that goes over the steps asks for them again and again
_ROWS_AT_ONCE = 1 << 20  # that a matrix is made of
_OF_PARAMETERS = ("parameter_grad", "parameter", "update")

Patterns = str | Sequence[str]


def load(path: str | Path, *, attempts: Literal["effective", "all"] = "effective") -> "RunData":
    """The run at `path`, for reading. Of a run that is still being written: what is on disk now.

    `path` is the run's folder; or, inside ./statsbridge-runs, its id, a unique beginning of the id, its name,
    or "latest". Each part is checked against its checksum when its table is first used; a damaged one is
    named in a StatsBridgeWarning and left out.

    `attempts`: of a run that was resumed, `"effective"` leaves out what a later attempt has superseded: the rows of
    earlier ones from its first step on. `"all"` has every row; the column `attempt` says whose it is.

    Raises LogError where there is no such run, SchemaTooNew where a newer statsbridge wrote it, ConfigError where
    `attempts` is something else.
    """
    return RunData.open(path, attempts=attempts)


class RunData(reader.RunData):
    """One run as it was when it was loaded: its four tables as pyarrow Tables, and answers from them.

    `path`: the run's folder. `id`: the run's id. `info`: what `run.json` says. Where a method has `step`, None means
    the last sampled one; `modules` is a name, a glob, or several. Ranks are merged everywhere but in the tables.
    Every method raises ConfigError, with the choices, for a name or a step that was not recorded.
    """

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """The sites that were recorded, in the order in which a training step comes by them."""
        there = self._sites()
        return tuple(site for site in SITES if site in there)

    def select(
        self,
        *,
        modules: Patterns = "*",
        sites: Patterns = "*",
        steps: Steps = (None, None),
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """Some rows of `stats`, ranks merged, sorted as it is; none where nothing was recorded there.

        `modules`, `sites`: names or globs. `steps`: the first and the last step, both included, None for no limit.
        `columns`: which, in this order; None for all. Of a run of many rows only what is asked for is read.
        """
        names = SCHEMAS["stats"].names
        for name in columns or ():
            if name not in (*names, "rank"):
                raise unknown_choice("column", name, (*names, "rank"))
        wanted = [name for name in dict.fromkeys(columns or names) if name != "rank"]
        keys = [] if columns is None else ["seq"]  # sorted by it where there are several parts
        first, last = steps
        rows = self._merged_rows(
            Wanted(
                _patterns(modules, "modules"),
                _patterns(sites, "sites"),
                (first, last),
                (*dict.fromkeys((*wanted, *keys)),),
            )
        )
        if rows.num_rows == 0:
            self._refuse_unknown(modules, sites)
        return rows if columns is None else rows.select(list(columns))

    def matrix(self, site: str, statistic: str, *, modules: Patterns = "*") -> Matrix:
        """One statistic of one site at every sampled step: see `Matrix`.

        `statistic`: a numeric column of `stats`, or `abs_max`, max(|min|, |max|).
        """
        (found,) = self.matrices(site, [statistic], modules=modules)
        return found

    def matrices(self, site: str, statistics: Sequence[str], *, modules: Patterns = "*") -> list[Matrix]:
        """Several statistics of one site as `matrix` gives them, read together."""
        for one in statistics:
            profiles.check_statistic(one, site)
        chosen = modules if isinstance(modules, str) else tuple(modules)
        missing = [one for one in statistics if (site, one, chosen) not in self._matrices]
        made = self._make(site, missing, modules, (None, None)) if missing else []
        new = {(site, one.statistic, chosen): one for one in made}
        found = [new.get((site, one, chosen)) or self._matrices[site, one, chosen] for one in statistics]
        for used in found:  # what was used last goes last
            self._matrices.pop((site, used.statistic, chosen), None)
            self._matrices[site, used.statistic, chosen] = used
        while len(self._matrices) > 1 and sum(kept.nbytes for kept in self._matrices.values()) > _MOST_BYTES:
            del self._matrices[next(iter(self._matrices))]
        return found

    def depth_profile(self, site: str, statistic: str, *, step: int | None = None, modules: Patterns = "*") -> pa.Table:
        """One statistic of one site along the depth of the model, and its range over all steps.

        Columns position (0, 1, … in data-flow order, the same at every step), module, call, tensor, type, depth, order,
        step, value, low, high. Null where there is no number.
        """
        return profiles.depth_profile(self.matrix(site, statistic, modules=modules), step)

    def by_type(self, site: str, statistic: str, *, step: int | None = None, modules: Patterns = "*") -> pa.Table:
        """One statistic of one site at one step, by type of module: columns type, members, value, low, high.

        `value` is the median of the members' values, `low` and `high` are the lowest and the highest one.
        """
        profiles.check_statistic(statistic, site)
        at = self._last(site) if step is None else step
        return profiles.by_type(self._make(site, [statistic], modules, (at, at))[0], None)

    def gradient_flow(self, *, step: int | None = None) -> pa.Table:
        """How large gradient and update of each parameter are at one step, and relative to the parameter.

        Columns position, module, call, type, tensor, depth, gradient_norm, parameter_norm, update_norm,
        gradient_to_parameter, update_to_parameter. The norms are L2 norms over the tensor.
        """
        at = self._last("parameter_grad") if step is None else step
        names = ("site", *profiles.columns_for("l2", "update_ratio"))
        rows = self._merged_rows(Wanted(sites=_OF_PARAMETERS, steps=(at, at), columns=names), ordered=False)
        sites = rows["site"].cast(pa.string())
        of = {site: rows.filter(pc.equal(sites, site)) for site in _OF_PARAMETERS}
        if of["parameter_grad"].num_rows == 0:
            self._refuse("parameter_grad", "*", at)
        (gradients,) = profiles.matrices(of["parameter_grad"], "parameter_grad", ["l2"])
        others = [
            profiles.matrices(of[site], site, [statistic])[0] if of[site].num_rows else None
            for site, statistic in (("parameter", "l2"), ("update", "l2"), ("update", "update_ratio"))
        ]
        return profiles.gradient_flow(gradients, others)

    def merged_over(
        self, *dimensions: str, modules: Patterns = "*", sites: Patterns = "*", steps: Steps = (None, None)
    ) -> pa.Table:
        """Rows merged over `step`, `call`, `tensor`, `module`, `type`, as if measured at once; ranks always are.

        `merged_over("step")` gives each module over the whole training, `merged_over("module")` each type of module
        at each step, `merged_over("module", "type", "step")` each site. See `merging.merge_over` for the columns.
        """
        kept = columns_kept(dimensions)
        columns = (*kept, *COUNTS, *STATISTICS, "histogram")
        return merge_over(self.select(modules=modules, sites=sites, steps=steps, columns=columns), dimensions)

    @cached_property
    def _matrices(self) -> dict[tuple[str, str, str | tuple[str, ...]], Matrix]:
        return {}

    @cached_property
    def _places(self) -> profiles.Places:
        return profiles.places_of(self.modules)

    def _make(self, site: str, statistics: Sequence[str], modules: Patterns, steps: Steps) -> list[Matrix]:
        if modules == "*" and steps == (None, None):
            read = (self._rows_for(site, statistics, some, steps) for some in self._in_groups(site))
            made = [profiles.matrices(rows, site, statistics) for rows in read if rows.num_rows]
            if made:
                return [profiles.joined(pieces) for pieces in zip(*made, strict=True)]
        rows = self._rows_for(site, statistics, modules, steps)
        if rows.num_rows == 0:
            self._refuse(site, modules, steps[0])
        return profiles.matrices(rows, site, statistics)

    def _in_groups(self, site: str) -> Iterator[tuple[str, ...]]:
        """The modules of a site with very many rows, some at a time; none where they can be read together."""
        rows = sum(part.rows for part in self._parts["stats"]) / max(len(self.sites), 1)
        names = (self._modules_of(site) or []) if rows > _ROWS_AT_ONCE else []
        together = max(int(_ROWS_AT_ONCE * len(names) / max(rows, 1)), 1)
        for first in range(0, len(names), together):
            yield tuple(map(glob.escape, names[first : first + together]))

    def _rows_for(self, site: str, statistics: Sequence[str], modules: Patterns, steps: Steps) -> pa.Table:
        wanted = Wanted(_patterns(modules, "modules"), (site,), steps, profiles.columns_for(*statistics))
        places = profiles.PLACE if self._large("stats") is not None and steps == (None, None) else ()
        if places:  # of each row the same again and again: the table of the modules has it too
            narrow = replace(wanted, columns=tuple(name for name in wanted.names if name not in places))
            rows = profiles.with_places(self._merged_rows(narrow, ordered=False), self._places)
            if rows is not None:
                return rows
        return self._merged_rows(wanted, ordered=False)

    def _last(self, site: str) -> int:
        """The last step at which `site` was sampled."""
        last = self._last_step([site])
        if last is None:
            self._refuse(site, "*", None)
        return last

    def _refuse(self, site: str, modules: Patterns, step: int | None) -> NoReturn:
        """Raise the ConfigError that says why there are no rows of `site`, at `step` where it is given."""
        if step is not None:
            steps = self._merged_rows(Wanted(sites=(site,), columns=("step",)), ordered=False)["step"]
            sampled = steps.unique().to_pylist()
            if sampled and step not in sampled:
                raise profiles.not_sampled(step, sampled)
        self._refuse_unknown(modules, site)
        raise ConfigError(f"no statistics of site {site} in {self.id} yet: a sampled step is written once it is closed")

    def _refuse_unknown(self, modules: Patterns, sites: Patterns) -> None:
        """Raise ConfigError where one of the patterns fits nothing that was recorded, at any step."""
        for name, patterns in (("site", _patterns(sites, "sites")), ("module", _patterns(modules, "modules"))):
            if patterns is None:
                continue
            there = list(self.sites) if name == "site" else self._modules()
            for pattern in patterns:
                if there and not any(matches(value, (pattern,)) for value in there):
                    raise unknown_choice(name, pattern, sorted(filter(None, there)))

    def _modules(self) -> list[str]:
        """The modules that any row is of."""
        column = self._merged_rows(Wanted(columns=("module",)), ordered=False)["module"]
        return [value for value in pc.unique(column.cast(pa.string())).to_pylist() if value is not None]


def _patterns(value: Patterns, argument: str) -> tuple[str, ...] | None:
    """One pattern or several as a tuple; None where everything fits. Raises ConfigError for anything else."""
    patterns = (value,) if isinstance(value, str) else tuple(value)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"{argument}={value!r}: give a name, a glob such as 'blocks.*', or a list of them")
    return None if "*" in patterns else patterns
