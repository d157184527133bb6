"""What stands in a report, run by run: findings first, pictures, tables, and what it was made with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..analyze.diagnosis import diagnose
from ..analyze.findings import SEVERITIES, Finding
from ..analyze.run_data import RunData
from ..errors import DamagedPart
from ..log.parts import ReadingParts, live_parts
from ..log.schema import SCHEMAS
from .app.facts import StepsOfParts
from .report_comparison import Parted, parted
from .report_pictures import Missing, Picture, modules_with_findings, pictures, shared_pictures
from .report_tables import (
    HEADERS,
    ModuleRow,
    differences,
    event_rows,
    flat,
    last_scalar,
    module_rows,
    number,
)

if TYPE_CHECKING:
    from .report import PolicyFacts, Subject

MOST_IN_FULL = 4
"""Of more runs than that each has its main pictures only: nobody looks at three hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One run. `facts`: label and text. `damaged`: parts of it that could not be read. `findings`: each with the place
    in the page that shows it.
    """

    prefix: str
    name: str
    id: str
    state: str
    facts: Sequence[tuple[str, str]]
    damaged: Sequence[str]
    findings: Sequence[tuple[Finding, str]]
    severities: Mapping[str, int]
    pictures: Sequence[Picture]
    missing: Sequence[Missing]
    modules: Sequence[ModuleRow]
    config: Mapping[str, str]
    versions: Mapping[str, str]
    attempts: Sequence[tuple[int, int, str]]
    events: Sequence[Mapping[str, Any]]
    more_events: int
    policy: PolicyFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several runs beside each other. `differences`: an entry of the config and its value in every run. `partings`: the
    runs with where each parts from the first, None for that one.
    """

    pictures: Sequence[Picture]
    missing: Sequence[Missing]
    rows: Sequence[tuple[Section, Sequence[str]]]
    differences: Sequence[tuple[str, Sequence[str | None]]]
    partings: Sequence[tuple[Section, Parted | None]]


def content(subjects: Sequence[Subject]) -> dict[str, Any]:
    """The variables of the template `report.html.jinja`."""
    names = _names([subject.data for subject in subjects])
    brief = len(subjects) > MOST_IN_FULL
    share = 1 / (len(subjects) + (len(subjects) > 1))  # and one for what they have in common
    sections = [
        _section(subject, f"run{number}", names[number], brief, share) for number, subject in enumerate(subjects)
    ]
    return {
        "title": names[0] if len(names) == 1 else f"{len(names)} runs",
        "sections": sections,
        "comparison": _comparison(subjects, sections) if len(subjects) > 1 else None,
        "brief": brief,
        "headers": HEADERS,
        "severities": SEVERITIES,
    }


def _names(runs: Sequence[RunData]) -> list[str]:
    """What each run is called in the report, each differently."""
    names = [str(run.info["name"]) for run in runs]
    counts = Counter(names)
    named = [name if counts[name] == 1 else f"{name} ({run.id})" for name, run in zip(names, runs, strict=True)]
    # The same run may have been given twice.
    seen = Counter[str]()
    for place, name in enumerate(named):
        seen[name] += 1
        named[place] = name if seen[name] == 1 else f"{name} [{seen[name]}]"
    return named


def _section(subject: Subject, prefix: str, name: str, brief: bool, share: float) -> Section:
    data, policy = subject.data, subject.policy
    findings = diagnose(data) if policy.alerts else []
    drawn = pictures(data, findings, prefix, brief=brief, share=share) if policy.pictures else []
    there = [picture for picture in drawn if isinstance(picture, Picture)]
    targets = _targets(findings, {picture.id for picture in there}, prefix)
    rows = module_rows(data, findings, targets)
    events, more = event_rows(data) if policy.alerts else ([], 0)
    return Section(
        prefix=prefix,
        name=name,
        id=data.id,
        state=subject.state,
        facts=_facts(data),
        damaged=list(_damaged(data)),
        findings=[(finding, _target(finding, targets, there, rows, prefix)) for finding in findings],
        severities=Counter(finding.severity for finding in findings),
        pictures=there,
        missing=[picture for picture in drawn if isinstance(picture, Missing)],
        modules=rows,
        config=flat(_mapping(data, "config")),
        versions={key: str(value) for key, value in _mapping(data, "versions").items()},
        attempts=[(one.number, one.first_step, one.started[:19].replace("T", " ")) for one in data.attempts],
        events=events,
        more_events=more,
        policy=policy,
    )


def _mapping(data: RunData, name: str) -> Mapping[str, Any]:
    """What `run.json` has under a name; what is no mapping, as somebody has made it, under that name."""
    found = data.info.get(name)
    if found is None or isinstance(found, Mapping):
        return found or {}
    return {name: found}


def _targets(findings: Sequence[Finding], ids: set[str], prefix: str) -> dict[str, str]:
    """Module → the id of its own picture."""
    named = {module: f"{prefix}-module-{place}" for place, module in enumerate(modules_with_findings(findings))}
    return {module: target for module, target in named.items() if target in ids}


def _target(
    finding: Finding, targets: Mapping[str, str], there: Sequence[Picture], rows: Sequence[ModuleRow], prefix: str
) -> str:
    """Where in the page a finding shows: its module's picture or row; the training's picture; "" for nowhere."""
    if finding.module is not None and finding.module in targets:
        return targets[finding.module]
    place = next((place for place, row in enumerate(rows) if row.module == finding.module), None)
    if place is not None:
        return f"{prefix}-row-{place}"
    training = f"{prefix}-training"
    return training if any(picture.id == training for picture in there) else ""


def _damaged(data: RunData) -> Iterator[str]:
    """What is wrong with the parts that are left out. A large run is not taken into memory for that."""
    for part in (part for table in SCHEMAS for part in live_parts(data.path, table)):
        try:
            with ReadingParts([part]):
                pass
        except DamagedPart as error:
            yield str(error)


def _facts(data: RunData) -> list[tuple[str, str]]:
    sampled = StepsOfParts().read(data.path)
    steps = data.scalars["step"].unique()
    loss = last_scalar(data, "loss")
    facts = [
        ("run", data.id),
        ("started", f"{str(data.info['created'])[:19].replace('T', ' ')} UTC"),
        ("steps", str(len(steps))),
        ("sampled steps", str(len(sampled)) + (f" ({sampled[0]} to {sampled[-1]})" if len(sampled) else "")),
        ("modules", str(len(data.modules["module"].unique()))),
    ]
    if ranks := len(data.scalars["rank"].unique()) - 1:
        facts.append(("ranks", str(ranks + 1)))
    if loss is not None:
        facts.append(("last loss", f"{loss:.4g}"))
    return facts


def _comparison(subjects: Sequence[Subject], sections: Sequence[Section]) -> Comparison:
    shown = {
        section.name: subject.data
        for section, subject in zip(sections, subjects, strict=True)
        if subject.policy.pictures
    }
    drawn = shared_pictures(shown) if len(shown) > 1 else []
    rows = []
    for section, subject in zip(sections, subjects, strict=True):
        facts = dict(section.facts)
        values = [number(last_scalar(subject.data, name)).text for name in ("loss", "grad_norm")]
        rows.append((section, [facts["started"], facts["steps"], facts["sampled steps"], *values]))
    runs = [subject.data for subject in subjects]
    configs = [
        {
            **_mapping(subject.data, "config"),
            **{f"{key} (version)": value for key, value in section.versions.items()},
        }
        for subject, section in zip(subjects, sections, strict=True)
    ]
    return Comparison(
        pictures=[picture for picture in drawn if isinstance(picture, Picture)],
        missing=[picture for picture in drawn if isinstance(picture, Missing)],
        rows=rows,
        differences=differences(configs),
        partings=list(zip(sections, parted(runs, [subject.policy.alerts for subject in subjects]), strict=True)),
    )
