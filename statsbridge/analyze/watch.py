"""Rows of a run as they are written, turned into findings: the same code live and offline."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .blocks import Block, block_of, slices_of
from .findings import SEVERITIES, Finding
from .rules import RULES
from .rules.against import Against
from .rules.known import Integers, Known, Names, column
from .rules.loss import InitialLoss, LossCourse
from .rules.norms import GradientNorms
from .rules.ranking import ranked
from .rules.step import Alarm, Fact, Hits, Rule, Step
from .rules.words import FACTS, WORDS
from .thresholds import Thresholds

if TYPE_CHECKING:
    from .baseline import Baseline

_OTHERS = ("modules", "scalars", "events")
_NORMS = frozenset({"grad_norm", "grad_norm_applied", "param_norm", "update_ratio"})
_LOSS = re.compile(r"(^|[/_.-])loss([/_.-]|$)", re.IGNORECASE)
_NOT_TRAINING = re.compile(r"(^|[/_.-])(val|valid|validation|eval|evaluation|test|dev)([/_.-]|$)", re.IGNORECASE)


@dataclass(slots=True)
class _Record:
    """One finding, and the modules that show it."""

    finding: Finding
    last: int
    modules: set[int]

    def finished(self, norms: GradientNorms) -> Finding:
        suggestions = self.finding.suggestions
        if self.finding.kind == "exploding_gradient" and (clipping := norms.suggestion(self.finding.step)):
            suggestions = (clipping, *suggestions)
        following = max(len(self.modules) - 1, 0)
        return replace(self.finding, last_step=self.last, following=following, suggestions=suggestions)


class Watch:
    """Judges a training by its rows, which are given to it in the order in which they are written.

    What it remembers is bounded by the size of the model, not by the length of the training. Where an attempt
    begins anew at an earlier step, what was found from there on is forgotten.

    `thresholds`: the limits; None for the usual ones. `baseline`: the ranges of a good run: a value inside them is
    no finding, one outside is. `whole`: whether the rows begin with the training, whichever attempt they are of; a
    process that resumes a run has not seen its start. `known`: what the rows so far were about.
    """

    def __init__(
        self, thresholds: Thresholds | None = None, *, baseline: Baseline | None = None, whole: bool = False
    ) -> None:
        self._limits = thresholds or Thresholds()
        self._baseline = baseline
        self.known = Known()
        self._names = Names()
        self._records: dict[str, _Record] = {}
        self._attempt = 0
        self._last = self._taken = -1
        self._first: int | None = None if not whole else sys.maxsize
        self._begin()

    def add(self, tables: Mapping[str, pa.Table]) -> list[Finding]:
        """Take further rows; the findings that are new, or worse than before, with them.

        Args:
            tables: any of "modules", "stats", "scalars", "events", with the columns of `statsbridge.log.SCHEMAS`
                (`seq` and `attempt` may be missing). Whole steps: the rows of one step come in one call.
        """
        stats = tables.get("stats")
        if stats is None or not stats.num_rows:
            return self.add_block(None, tables)
        return self.add_block(block_of(stats, self._keys(stats), self.known), tables)

    def add_block(self, block: Block | None, others: Mapping[str, pa.Table]) -> list[Finding]:
        """The same with the rows of `stats` as a block, of the identities of `known`."""
        new: dict[str, None] = {}
        for attempt, taken, step in self._steps(block, others):
            if taken and attempt > self._attempt:
                self._go_on(attempt, step.step)
            if taken:
                self._taken = max(self._taken, step.step)
                self._first = step.step if self._first is None else min(self._first, step.step)
            self._last = max(self._last, step.step)
            self._norms.add(step)
            # Of float64 that diverges squares and ratios overflow: what is infinite lies beyond every limit, what is
            # NaN beyond none, and nobody's training is the place for numpy's warnings about it.
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                for rule in self._rules:
                    for found in rule.look(step):
                        if self._note(found, step):
                            new[found.kind] = None
        return ranked(self._records[kind].finished(self._norms) for kind in new if kind in self._records)

    def findings(self) -> list[Finding]:
        """All findings so far, first cause first."""
        return ranked(record.finished(self._norms) for record in self._records.values())

    # ------------------------------------------------------------------ rows into steps

    def _steps(self, block: Block | None, others: Mapping[str, pa.Table]) -> Iterator[tuple[int, bool, Step]]:
        """The steps in the rows, in order, each with its attempt, and whether the training has taken it then."""
        parts = {name: self._part(name, others[name]) for name in _OTHERS if name in others and others[name].num_rows}
        sampled = {} if block is None else block.slices
        keys = sorted({*sampled, *(key for part in parts.values() for key in part.slices)})
        for key in keys:
            here = {name: part.rows(key) for name, part in parts.items() if key in part.slices}
            if "modules" in here:
                self.known.add_modules(parts["modules"].table.take(here["modules"]))
            scalars = self._scalars(parts["scalars"].columns, here["scalars"]) if "scalars" in here else {}
            taken = key in sampled or any(parts[name].columns["taken"][rows].any() for name, rows in here.items())
            yield (
                key[0],
                taken,
                Step(
                    step=key[1],
                    known=self.known,
                    scalars=scalars,
                    losses={name: value for name, value in scalars.items() if _is_loss(name)},
                    facts=tuple(parts["events"].columns["fact"][row] for row in here.get("events", ())),
                    rows=block.rows(key) if block is not None and key in sampled else None,
                ),
            )

    def _part(self, name: str, table: pa.Table) -> _Part:
        if name == "events":
            table = table.filter(pc.is_in(table["kind"].cast(pa.string()), pa.array(sorted(FACTS))))
        # What the user logs outside of steps may be about any; the rest is of a step that the training has taken.
        columns: dict[str, Any] = {
            "taken": pc.is_valid(table["iteration" if name == "scalars" else "step"]).to_numpy(),
        }
        if name == "scalars":
            columns |= {"name": self._names.numbers(table["name"]), "value": column(table, "value")}
        elif name == "events":
            columns |= {"fact": [Fact(*row.values()) for row in table.select(Fact._fields).to_pylist()]}
        return _Part(table, self._keys(table), columns)

    def _keys(self, table: pa.Table) -> tuple[Integers, Integers]:
        return self._attempts(table), table["step"].fill_null(max(self._last, 0)).to_numpy()

    def _attempts(self, table: pa.Table) -> Integers:
        if "attempt" in table.column_names and not table["attempt"].null_count:
            attempts: Integers = table["attempt"].to_numpy()
            return attempts
        closing = pc.is_valid(table["iteration"]).to_numpy() if "iteration" in table.column_names else None
        result = np.full(table.num_rows, self._attempt)
        if closing is not None and closing.any():
            steps = table["step"].to_numpy()[closing]
            back = np.cumsum(np.diff(steps, prepend=self._last) < 0)
            result[closing] += back
        return result

    def _scalars(self, columns: Mapping[str, Any], rows: Integers) -> dict[str, float]:
        values: dict[str, float] = {}
        for number, value in zip(columns["name"][rows].tolist(), columns["value"][rows].tolist(), strict=True):
            name = self._names.names[number]
            # Of several ranks the first, unless another has what is not finite.
            if _is_wanted(name) and (name not in values or not math.isfinite(value)):
                values[name] = value
        return values

    # ------------------------------------------------------------------ what rules say

    def _begin(self) -> None:
        self._norms = GradientNorms()
        self._rules: list[Rule] = [make(self._limits) for make in RULES]
        self._against = None if self._baseline is None else Against(self._limits, self._baseline)
        if self._against is not None:
            self._rules.append(self._against)

    def _go_on(self, attempt: int, step: int) -> None:
        """A later attempt supersedes what was recorded from `step` on: where rules have seen that, they begin anew."""
        self._attempt = attempt
        if 0 <= self._taken < step:  # as offline: nothing that was seen is superseded, and the training goes on
            return
        self._last = self._taken = step
        self._records = {kind: record for kind, record in self._records.items() if record.finding.step < step}
        for record in self._records.values():
            record.last = min(record.last, step - 1)
        self._begin()
        if step > (self._first or 0):  # in the middle of a training, whose first losses these rules have not seen
            self._rules = [rule for rule in self._rules if not isinstance(rule, InitialLoss)]
            for rule in self._rules:
                if isinstance(rule, LossCourse):
                    rule.from_the_start = False

    def _note(self, found: Hits | Alarm, step: Step) -> bool:
        """Keep what a rule said; whether it is new, or worse than before."""
        record = self._records.get(found.kind)
        if isinstance(found, Hits):
            found = found if self._against is None else self._against.usual(found, step)
            if len(found.ids) == 0:
                return False
            modules = set(np.unique(self.known.module[found.ids]).tolist())
        else:
            modules = {self.known.modules.number(found.module)} if found.module is not None else set()
        if record is not None:
            record.last = step.step
            record.modules |= modules
            if SEVERITIES.index(found.severity) >= SEVERITIES.index(record.finding.severity):
                return False
            modules = record.modules
        finding = self._of_rows(found) if isinstance(found, Hits) else self._of_all(found)
        self._records[found.kind] = _Record(finding, step.step, modules)
        return True

    def _of_rows(self, hits: Hits) -> Finding:
        known = self.known
        places = known.places(hits.ids, backward=hits.backward)
        first = places[np.argsort(hits.since[places], kind="stable")[0]]
        identity, value = int(hits.ids[first]), float(hits.values[first])
        words = WORDS[hits.kind]
        depth = float(known.depth[identity])
        return Finding(
            kind=hits.kind,
            severity=hits.severity,
            step=int(hits.since[first]),
            message=hits.say(known.module_name(identity), identity, value),
            module=known.module_name(identity),
            site=known.site_name(identity),
            tensor=known.tensor_name(identity) or None,
            value=value,
            threshold=hits.threshold,
            causes=(*hits.causes, *words.causes),
            suggestions=words.suggestions,
            type=known.type_name(identity),
            call=int(known.call[identity]),
            depth=int(depth) if math.isfinite(depth) else None,
        )

    def _of_all(self, alarm: Alarm) -> Finding:
        words = WORDS[alarm.kind]
        type_, depth = ("", None) if alarm.module is None else self.known.about(alarm.module)
        return Finding(
            kind=alarm.kind,
            severity=alarm.severity,
            step=alarm.since,
            message=alarm.message,
            module=alarm.module,
            site=alarm.site,
            tensor=alarm.tensor,
            value=alarm.value,
            threshold=alarm.threshold,
            causes=alarm.causes or words.causes,
            suggestions=alarm.suggestions or words.suggestions,
            type=type_,
            depth=depth,
        )


class _Part:
    """The rows of one table by (attempt, step)."""

    def __init__(self, table: pa.Table, keys: tuple[Integers, Integers], columns: Mapping[str, Any]) -> None:
        self.table, self.columns = table, columns
        attempts, steps = keys
        self._order = np.lexsort((steps, attempts))
        self.slices = slices_of(attempts[self._order], steps[self._order])

    def rows(self, key: tuple[int, int]) -> Integers:
        start, end = self.slices[key]
        return self._order[start:end]


@lru_cache(1 << 12)
def _is_loss(name: str) -> bool:
    return bool(_LOSS.search(name)) and not _NOT_TRAINING.search(name)


@lru_cache(1 << 12)
def _is_wanted(name: str) -> bool:
    return name in _NORMS or name.startswith("lr/") or _is_loss(name)
