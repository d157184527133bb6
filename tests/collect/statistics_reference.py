"""Right values for the tests of the statistics: scipy and numpy in float64, and closed forms."""

import math
from collections.abc import Callable

import numpy as np
import scipy.integrate
import scipy.stats
import torch

from statsbridge.collect.statistics import Piece, Reducer, Wanted, measure, pack

GAUSSIAN_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)


def rows_of(*pieces: Piece | list[Piece], wanted: Wanted | None = None) -> dict[str, np.ndarray]:
    """The rows that pieces become; a list of pieces becomes one row."""
    wanted = Wanted(histogram=True) if wanted is None else wanted
    numbered = [
        (number, piece) for number, one in enumerate(pieces) for piece in (one if isinstance(one, list) else [one])
    ]
    pack([piece for _, piece in numbered])
    reducer = Reducer(wanted)
    reducer.add([number for number, _ in numbered], [piece for _, piece in numbered])
    return reducer.finish(len(pieces))


def measured(tensor: torch.Tensor, **keywords: torch.Tensor) -> dict[str, float]:
    """One tensor's row."""
    rows = rows_of(measure(tensor, Wanted(histogram=True), **keywords))
    return {name: values[0] for name, values in rows.items()}


def expected(values: np.ndarray) -> dict[str, float]:
    """The statistics by their definitions, in float64."""
    values = np.asarray(values, dtype=np.float64).ravel()
    finite = values[np.isfinite(values)]
    result = {
        "count": values.size,
        "nan_count": int(np.isnan(values).sum()),
        "inf_count": int(np.isinf(values).sum()),
    }
    if not finite.size:
        return result
    # Skewness and kurtosis do not depend on the scale; fourth powers of 1e-90 would.
    scaled = finite / max(np.abs(finite).max(), 1e-300)
    constant = finite.min() == finite.max()
    return result | {
        "mean": finite.mean(),
        "std": 0.0 if constant else scaled.std() * np.abs(finite).max(),
        "skewness": math.nan if constant else scipy.stats.skew(scaled),
        "kurtosis": math.nan if constant else scipy.stats.kurtosis(scaled),
        "min": finite.min(),
        "max": finite.max(),
        "abs_mean": np.abs(finite).mean(),
        "l2": np.linalg.norm(scaled) * np.abs(finite).max(),
        "zero_fraction": (finite == 0).mean(),
    }


def assert_statistics(row: dict[str, float], values: np.ndarray) -> None:
    """Within the accuracy that is promised: 1e-5 of std for mean, 1e-5 for std, 1e-3 for the higher moments."""
    right = expected(values)
    for name in ("count", "nan_count", "inf_count"):
        assert row[name] == right[name], name
    if "mean" not in right:
        assert all(math.isnan(row[name]) for name in ("mean", "std", "skewness", "min", "max", "l2", "abs_mean"))
        return
    for name in ("min", "max", "zero_fraction"):
        assert row[name] == right[name], name
    assert abs(row["mean"] - right["mean"]) <= 1e-5 * right["std"] + 1e-15 * abs(right["mean"])
    assert abs(row["std"] - right["std"]) <= 1e-5 * right["std"]
    for name in ("skewness", "kurtosis"):
        if math.isnan(right[name]):
            assert math.isnan(row[name]), name
        else:
            assert abs(row[name] - right[name]) <= 1e-3 * max(1, abs(right[name])), name
    for name in ("abs_mean", "l2"):
        assert abs(row[name] - right[name]) <= 1e-5 * right[name], name


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values as float64; every float dtype of torch fits into it."""
    return tensor.detach().double().numpy()


def entropy_of(density: Callable[[float], float], low: float, high: float) -> float:
    """Differential entropy in nats, by numerical integration."""

    def integrand(x: float) -> float:
        p = density(x)
        return -p * math.log(p) if p > 0 else 0.0

    return scipy.integrate.quad(integrand, low, high, limit=400)[0]


def divergence(mean: float, std: float, entropy: float) -> float:
    """KL(p ‖ N(0, 1)) = E ln p − E ln φ, in nats."""
    return -entropy + 0.5 * math.log(2 * math.pi) + 0.5 * (mean**2 + std**2)
