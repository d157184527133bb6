"""One or several runs as one HTML file that holds all it needs: nothing is fetched when it is opened."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..analyze.run_data import RunData
from ..errors import ConfigError, PolicyError
from ..log.files import write_durably
from ..log.runs import run_state

if TYPE_CHECKING:
    from jinja2 import Environment

_MARK = b'<meta name="generator" content="statsbridge report">'
_MARKED_WITHIN = 4096  # bytes of a file in which its mark is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """What the policy has to do with a report.

    `restricted`: whether the run is. `files`: the policy files that bind it, each as label and text. `left_out`: what
    is not in the report and why. `deliveries`: what has left to trackers, one entry for each destination and channel.
    `pictures`, `alerts`: whether they may be in it.
    """

    restricted: bool = False
    files: Sequence[Mapping[str, str]] = ()
    left_out: Sequence[str] = ()
    deliveries: Sequence[Mapping[str, Any]] = ()
    pictures: bool = True
    alerts: bool = True


@dataclass(frozen=True, slots=True)
class Subject:
    """A run to report on. `data`: what of it may be shown. `state`: its state, as `statsbridge ls` words it."""

    data: RunData
    state: str
    policy: PolicyFacts = field(default_factory=PolicyFacts)


def write_report(
    runs: RunData | Subject | Sequence[RunData | Subject], file: str | Path, *, force: bool = False
) -> Path:
    """Write a report on `runs` to `file`, as HTML, and give its absolute path.

    Several runs are laid over each other first. A file of that name is replaced if it is a report, or with `force`.

    Raises ConfigError where it may not be replaced, cannot be written, there is no run, or Jinja2 or Plotly (extra
    `statsbridge[view]`) is missing; PolicyError for a restricted run as `load` gives it, of which a policy has to say
    what may be in a file: `statsbridge report` asks it.
    """
    path = Path(file).absolute()
    refuse_to_replace(path, force=force)
    content = report_html(runs)
    try:
        write_durably(path, content.encode(errors="backslashreplace"))  # a path in a config may be no text
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def refuse_to_replace(path: Path, *, force: bool = False) -> None:
    """Raise ConfigError where a report may not be written to `path`."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give the name of a file, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} to write {path.name} into: make it first")
    if force or not path.exists():
        return
    try:
        with path.open("rb") as old:
            ours = _MARK in old.read(_MARKED_WITHIN)
    except OSError as error:
        raise ConfigError(f"cannot read {path}, which is there already: {error.strerror or error}") from error
    if not ours:
        raise ConfigError(
            f"{path} is there already and is no report of statsbridge: give another name, or --force to replace it"
        )


def report_html(runs: RunData | Subject | Sequence[RunData | Subject]) -> str:
    """The report that `write_report` writes. Raises ConfigError, PolicyError as it does."""
    subjects = [_subject(one) for one in ([runs] if isinstance(runs, RunData | Subject) else runs)]
    if not subjects:
        raise ConfigError("a report needs a run: give at least one")
    environment = _environment()
    plotly = _plotly()
    from .report_content import content

    own = _inside_script(_source(environment, "report.js"))
    return environment.get_template("report.html.jinja").render(
        **content(subjects),
        generator=_MARK.decode(),
        version=__version__,
        made=datetime.now(UTC).isoformat(sep=" ", timespec="minutes")[:16],
        plotly=plotly,
        script=own,
        style=_source(environment, "report.css"),
        script_hashes=" ".join(f"'{_hash(text)}'" for text in (plotly, own)),
    )


def _subject(run: RunData | Subject) -> Subject:
    if isinstance(run, Subject):
        return run
    if run.info.get("restricted"):
        raise PolicyError(
            f"run {run.id} is restricted: only what a policy lets out may be in a file. Make the report with "
            f"statsbridge report {run.id}, which asks it"
        )
    return Subject(run, run_state(run.path))


def _environment() -> Environment:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise ConfigError("a report needs Jinja2: pip install 'statsbridge[view]'") from None
    return Environment(
        loader=PackageLoader("statsbridge.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _plotly() -> str:
    """The source of plotly.js, in a form that can stand inside a script element."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError("a report needs Plotly: pip install 'statsbridge[view]'") from None
    return _inside_script(get_plotlyjs())


def _source(environment: Environment, name: str) -> str:
    """A file beside the template, as it is."""
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _inside_script(text: str) -> str:
    # A browser ends the element at the first, and reads the second as the begin of a comment. In the code that we put
    # there both stand in strings, where the backslash means nothing.
    return text.replace("\r\n", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(text: str) -> str:
    """The source expression for a script of the page's own (Content Security Policy Level 3, 2.3.1)."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
