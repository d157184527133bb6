"""How much the samples of a batch differ from each other, for many small tensors at once."""

import numpy as np
import numpy.typing as npt

#: Samples that differ by no more than this, relative to the largest element, count as alike.
ALIKE = 1e-5

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def sample_spreads(values: Floats, starts: Integers, lengths: Integers, samples: Integers) -> Floats:
    """How much the samples of each tensor differ: max |x − first sample| / max |x|; 0 where all are equal.

    Args:
        values: the elements of many tensors one after the other.
        starts: where each of the tensors asked about begins, shape `[tensors]`.
        lengths: their elements; samples one after the other.
        samples: how many each has, at least 2.

    Returns:
        Shape `[tensors]`. Where two samples differ by more than `ALIKE` already, their difference; NaN where one of
        the two is not finite.
    """
    features = lengths // samples
    offsets = np.cumsum(features) - features
    place = np.repeat(starts - offsets, features) + np.arange(int(features.sum()))
    one, other = values[place], values[place + np.repeat(features, features)]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        differ = np.maximum.reduceat(np.abs(one - other), offsets)
        largest = np.maximum.reduceat(np.maximum(np.abs(one), np.abs(other)), offsets)
        spread: Floats = np.where(differ == 0, 0.0, differ / largest)
    for tensor in np.flatnonzero(spread <= ALIKE).tolist():
        begin, length = int(starts[tensor]), int(lengths[tensor])
        spread[tensor] = _spread(values[begin : begin + length].reshape(int(samples[tensor]), -1))
    return spread


def _spread(samples: Floats) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        differ = float(np.abs(samples - samples[0]).max())
    return 0.0 if differ == 0 else differ / float(np.abs(samples).max())
