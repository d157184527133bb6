"""Exact merging of rows of statistics, and the layout of the histogram bins. A leaf: numpy only.

A row `(count, mean, std, skewness, kurtosis)` gives the central moments of its elements back, so rows of
micro-batches, ranks, steps or modules merge as if all their elements had been measured at once.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]

COUNTS = ("count", "nan_count", "inf_count")
STATISTICS = (
    "mean",
    "std",
    "skewness",
    "kurtosis",
    "min",
    "max",
    "abs_mean",
    "l2",
    "zero_fraction",
    "kl_unit_gaussian",
)

LOWEST_EXPONENT = -64
HIGHEST_EXPONENT = 31
_EXPONENTS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
HISTOGRAM_BINS = 2 * _EXPONENTS + 5
ZERO_BIN = _EXPONENTS + 2


def histogram_edges() -> Floats:
    """The edges between the bins of the `histogram` column, shape `[HISTOGRAM_BINS - 1]`, ascending.

    The bins, in ascending order of value: −2³² and below; (−2^(e+1), −2^e] for e = 31 … −64; (−2⁻⁶⁴, 0); exactly
    zero; (0, 2⁻⁶⁴); [2^e, 2^(e+1)) for e = −64 … 31; 2³² and above. The bin of exact zeros has the edges −0.0 and 0.0.
    """
    powers = np.exp2(np.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT + 2, dtype=np.float64))
    return np.concatenate((-powers[::-1], [-0.0, 0.0], powers))


def merge_rows(columns: Mapping[str, AnyArray], group: AnyArray, groups: int) -> dict[str, AnyArray]:
    """Merge rows of statistics, as if the elements behind them had been measured together.

    Args:
        columns: the statistics columns of the `stats` table, one array of shape `[rows]` each: `count`,
            `nan_count`, `inf_count` (integers) and the float columns, where NaN stands for null; a float column that is
            missing is all null. `histogram`, if there, is of shape `[rows, bins]`, integers.
        group: shape `[rows]`, the number in `range(groups)` of the result row that each row goes into.
        groups: how many rows the result has.

    Returns:
        The same columns, with `groups` rows. A row without finite elements adds to the counts only; a group
        without any finite element is null. `std` is exactly 0 where min = max, and skewness and kurtosis are null
        there. `kl_unit_gaussian` does not merge: all null. A statistic that is null in a row which has elements
        is null in the result (`skewness` and `kurtosis` of a constant excepted: those merge as 0).

    Central moments about the common mean, from each row's own moments by the binomial theorem: the many-row form
    of the pairwise updates of Chan, Golub & LeVeque (1983) and Pébay (SAND2008-6212), without raw power sums.
    """
    group = np.asarray(group, dtype=np.int64)
    merged: dict[str, AnyArray] = {name: _add(columns[name], group, groups) for name in COUNTS}
    finite = columns["count"] - columns["nan_count"] - columns["inf_count"]
    used = np.flatnonzero(finite > 0)
    total = merged["count"] - merged["nan_count"] - merged["inf_count"]
    rows = {name: _float_column(columns, name, used) for name in STATISTICS}
    owner = group[used]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore", under="ignore"):
        weight = finite[used] / total[owner]
        merged.update(_merge_moments(rows, weight, owner, groups))
        merged["abs_mean"] = _sum(owner, weight * rows["abs_mean"], groups)
        zeros = np.rint(finite[used] * rows["zero_fraction"])
        merged["zero_fraction"] = _sum(owner, zeros, groups) / total
        merged["l2"] = _root_of_squares(rows["l2"], owner, groups)
    for name in STATISTICS[:-1]:
        merged[name][total == 0] = np.nan
    merged["kl_unit_gaussian"] = np.full(groups, np.nan)
    if "histogram" in columns:
        merged["histogram"] = _add(columns["histogram"], group, groups)
    return merged


def _sum(owner: Integers, terms: Floats, groups: int) -> Floats:
    # Without any terms numpy would count integers.
    return np.bincount(owner, terms, groups).astype(np.float64, copy=False)


def _add(column: AnyArray, group: Integers, groups: int) -> Integers:
    result = np.zeros((groups, *column.shape[1:]), dtype=np.int64)
    np.add.at(result, group, np.asarray(column, dtype=np.int64))
    return result


def _float_column(columns: Mapping[str, AnyArray], name: str, used: Integers) -> Floats:
    if name not in columns:
        return np.full(len(used), np.nan)
    return np.asarray(columns[name], dtype=np.float64)[used]


def _merge_moments(rows: Mapping[str, Floats], weight: Floats, owner: Integers, groups: int) -> dict[str, Floats]:
    """mean, std, skewness, kurtosis, min and max of each group; garbage for a group without rows."""
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(low, owner, rows["min"])
    np.maximum.at(high, owner, rows["max"])
    # Means are averaged as distances from one of them: 1e4 + 1e-9 would be lost in a sum of many 1e4.
    origin = np.zeros(groups)
    origin[owner[::-1]] = rows["mean"][::-1]
    mean = origin + _sum(owner, weight * (rows["mean"] - origin[owner]), groups)
    distance = rows["mean"] - mean[owner]
    # In units of the widest row: fourth powers of 1e-90 or 1e90 do not fit float64.
    unit = np.zeros(groups)
    np.maximum.at(unit, owner, np.maximum(np.abs(distance), rows["std"]))
    unit[unit == 0] = 1.0
    spread, distance = rows["std"] / unit[owner], distance / unit[owner]
    third = np.where(spread == 0, 0.0, rows["skewness"])
    fourth = np.where(spread == 0, 0.0, rows["kurtosis"] + 3.0)
    variance = _sum(owner, weight * (spread**2 + distance**2), groups)
    m3 = weight * (third * spread**3 + 3 * distance * spread**2 + distance**3)
    m4 = weight * (fourth * spread**4 + 4 * distance * third * spread**3 + 6 * distance**2 * spread**2 + distance**4)
    return {
        "mean": mean,
        "std": np.sqrt(variance) * unit,
        "skewness": _sum(owner, m3, groups) / variance**1.5,
        "kurtosis": _sum(owner, m4, groups) / variance**2 - 3.0,
        "min": low,
        "max": high,
    }


def _root_of_squares(values: Floats, owner: Integers, groups: int) -> Floats:
    largest = np.zeros(groups)
    np.maximum.at(largest, owner, values)
    unit = np.where(largest == 0, 1.0, largest)
    return np.sqrt(_sum(owner, (values / unit[owner]) ** 2, groups)) * largest
