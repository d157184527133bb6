"""Where the runs of a report part from the first of them, module by module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..analyze.comparison import Comparison, Parting, compare
from ..analyze.run_data import RunData
from ..wording import counted
from .report_tables import Number, number

MOST_PARTINGS = 12
"""Of each run: what comes later mostly follows from it."""
_WORDS = {"outside": "leaves the range of the first run", "not finite": "is not finite", "missing": "has no number"}


@dataclass(frozen=True, slots=True)
class PartingRow:
    """One statistic that parts. `there`: the range of the first run, widened by what a comparison allows."""

    step: int
    module: str
    call: int
    what: str
    kind: str
    value: Number
    there: str
    modules: int


@dataclass(frozen=True, slots=True)
class Parted:
    """One run beside the first. `verdict`: one sentence. `more`: how many statistics part beyond `rows`."""

    verdict: str
    rows: Sequence[PartingRow]
    more: int = 0


def parted(runs: Sequence[RunData], shown: Sequence[bool]) -> list[Parted | None]:
    """For each run but the first where it parts from that one, first cause first; for the first None.

    `shown`: whether the policy of each run lets judgements of it out. What of a run may not be in a file is not in its
    data here either, and is not compared.
    """
    found: list[Parted | None] = [None]
    for other, allowed in zip(runs[1:], shown[1:], strict=True):
        if allowed and shown[0]:
            (comparison,) = compare(runs[0], other)
            found.append(_told(comparison))
        else:
            found.append(Parted("withheld by the policy", ()))
    return found


def _told(comparison: Comparison) -> Parted:
    first = comparison.first
    alone = len(comparison.only_good) + len(comparison.only_other)
    are = "is" if alone == 1 else "are"
    aside = f"; {counted(alone, 'module')} that only one of the two has {are} not compared" if alone else ""
    if comparison.steps is None:
        return Parted(f"has no sampled step of a common site to compare{aside}", ())
    begin, end = comparison.steps
    if first is None:
        return Parted(f"does not part from it between step {begin} and step {end}{aside}", ())
    rows = [_row(one) for one in comparison.partings[:MOST_PARTINGS]]
    verdict = f"parts at step {first.step}, compared from step {begin} to step {end}{aside}"
    return Parted(verdict, rows, len(comparison.partings) - len(rows))


def _row(one: Parting) -> PartingRow:
    there = "" if one.low is None or one.high is None else f"{number(one.low).text} to {number(one.high).text}"
    what = " ".join(part for part in (one.site, one.tensor, one.statistic) if part)
    value = number(one.value) if one.kind == "outside" else number(None)
    return PartingRow(one.step, one.module, one.call, what, _WORDS[one.kind], value, there, one.modules)
