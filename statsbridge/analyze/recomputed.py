"""Scalars of a record against the same values as an independent program recomputed them."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ConfigError
from .choices import unknown_choice

COLUMNS = ("name", "step", "value")
TOLERANCE = 1e-6


class Recomputed(NamedTuple):
    """One line of the file."""

    line: int
    name: str
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that is not what was recorded. `recorded`: None where there is no such name and step."""

    kind: Literal["missing", "different"]
    line: int
    name: str
    step: int
    recorded: float | None
    recomputed: float

    @property
    def relative(self) -> float | None:
        """|recorded − recomputed| over the larger of the two; None where that is no number."""
        if self.recorded is None or not math.isfinite(self.recorded) or not math.isfinite(self.recomputed):
            return None
        # Halves, because the difference of two finite numbers may overflow.
        size = max(abs(self.recorded), abs(self.recomputed)) / 2
        return abs(self.recorded / 2 - self.recomputed / 2) / size if size else 0.0


def read_recomputed(file: Path) -> list[Recomputed]:
    """The lines of a CSV file with the columns name, step and value; others are ignored.

    Raises ConfigError, with the line and what is wrong there.
    """
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            return list(_lines(file, csv.DictReader(text)))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{file} is no CSV file: {error}") from error


def _lines(file: Path, reader: csv.DictReader[str]) -> Iterator[Recomputed]:
    header = [name.strip() for name in reader.fieldnames or ()]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise ConfigError(
            f"{file} has no column {', '.join(missing)}: the first line must name the columns {', '.join(COLUMNS)}; "
            f"it is {','.join(header)[:200]!r}"
        )
    reader.fieldnames = header
    for row in reader:
        where = f"{file}, line {reader.line_num}"
        name, step, value = (row[column] for column in COLUMNS)
        if None in (name, step, value):
            raise ConfigError(f"{where}: fewer cells than columns")
        try:
            label = int(step)
        except ValueError:
            raise ConfigError(f"{where}: step {step!r} is no whole number") from None
        try:
            number = float(value)
        except ValueError:
            raise ConfigError(f"{where}: value {value!r} is no number (NaN and inf are)") from None
        yield Recomputed(reader.line_num, name, label, number)


def compare_scalars(scalars: pa.Table, recomputed: list[Recomputed], tolerance: float = TOLERANCE) -> list[Difference]:
    """The recomputed values that are not what was recorded, in the order of the file.

    Args:
        scalars: the `scalars` table of a run. The lowest rank's values count; of several of one name and step,
            the last one recorded.
        recomputed: what `read_recomputed` gave. What it does not have is not compared.
        tolerance: the largest relative difference, of the larger of the two values, that is none; 0 asks for
            equal numbers. NaN equals NaN, and an infinity only itself.

    Raises ConfigError for a tolerance below 0, and for a name that was never recorded.
    """
    if not 0 <= tolerance < math.inf:
        raise ConfigError(f"tolerance={tolerance}: give a number from 0 on, such as 1e-6")
    recorded = _recorded(scalars)
    names = {name for name, _ in recorded}
    differences = []
    for one in recomputed:
        if one.name not in names:
            raise unknown_choice("scalar", one.name, sorted(names))
        value = recorded.get((one.name, one.step))
        found = Difference("missing" if value is None else "different", one.line, one.name, one.step, value, one.value)
        if value is None or not _equal(value, one.value, found.relative, tolerance):
            differences.append(found)
    return differences


def _equal(recorded: float, recomputed: float, relative: float | None, tolerance: float) -> bool:
    if relative is None:
        return recorded == recomputed or (math.isnan(recorded) and math.isnan(recomputed))
    return relative <= tolerance


def _recorded(scalars: pa.Table) -> dict[tuple[str, int], float]:
    rows = scalars.filter(pc.equal(scalars["rank"], pc.min(scalars["rank"]))).sort_by("seq")
    columns = (rows[name].to_pylist() for name in COLUMNS)
    return {(name, step): value for name, step, value in zip(*columns, strict=True) if value is not None}
