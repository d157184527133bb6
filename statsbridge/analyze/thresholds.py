"""The limits of the rules, each a keyword.

The figures are the usual ones of the field: dead ReLU units (Lu et al. 2019, "Dying ReLU and
Initialization"), vanishing and exploding gradients (Glorot and Bengio 2010; Pascanu et al. 2013), and an
update ratio near 1e-3 (Karpathy, "A Recipe for Training Neural Networks"). They are rules of thumb, not
laws: pass a `Thresholds` of your own where a model is known to live elsewhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real

from ..errors import ConfigError
from ..wording import shown
from .choices import unknown_choice

#: Limits that count something, and the least each may be: what holds for no sample at all would hold everywhere.
_LEAST_COUNT = {"persistence": 1, "classes": 0, "skipped_steps": 0}
_MOST_COUNT = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The limits of the rules; a value exactly at a limit is not marked. docs/rules.md says which rule uses which.

    `persistence`: how many samples (of a scalar: steps) in a row a rule must hold before it speaks, where a single
    one proves nothing. `classes`: the number of classes, where the loss is a cross-entropy in nats over so many;
    None where it is not known, and then the loss at the start is not judged.
    """

    persistence: int = 5
    zero_fraction: float = 0.5
    zero_fraction_critical: float = 0.8
    zero_fraction_growth: float = 0.1
    activation_mean: float = 10.0
    activation_std: float = 1e-6
    activation_growth: float = 1000.0
    activation_growth_critical: float = 1e6
    saturation_slope: float = 0.05
    gradient_small: float = 1e-7
    gradient_large: float = 100.0
    gradient_ratio: float = 1 / 100
    gradient_ratio_critical: float = 1 / 1000
    gradient_ratio_large: float = 100.0
    gradient_norm_growth: float = 100.0
    gradient_accumulation: float = 3.0
    underflow: float = 0.1
    update_ratio: float = 0.1
    update_ratio_critical: float = 1.0
    update_ratio_small: float = 1e-6
    update_rounded: float = 0.9
    loss_spike: float = 3.0
    loss_decrease: float = 0.99
    loss_flat: float = 1e-6
    loss_oscillation: float = 0.6
    initial_loss: float = 0.5
    classes: int | None = None
    skipped_steps: int = 10

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "classes":
                continue
            if isinstance(value, int) and abs(value) > sys.float_info.max:
                raise ConfigError(f"threshold {field.name}={shown(value)}: give a smaller number")
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"threshold {field.name}={value!r}: give a number of at least 0")
            if field.name in _LEAST_COUNT:
                least, number = _LEAST_COUNT[field.name], float(value)
                if not (number.is_integer() and least <= number <= _MOST_COUNT):
                    raise ConfigError(
                        f"threshold {field.name}={value!r}: give a whole number from {least} to {_MOST_COUNT:,}"
                    )
                object.__setattr__(self, field.name, int(number))


def make_thresholds(given: Thresholds | Mapping[str, float] | None) -> Thresholds:
    """The limits that are meant: as they are, the usual ones with some replaced, or (None) the usual ones.

    Raises ConfigError for a name that is no threshold, a value that is no number of at least 0, or one that counts
    something (`persistence`, which is 1 at least, `classes`, `skipped_steps`) and is no whole number.
    """
    if given is None:
        return Thresholds()
    if isinstance(given, Thresholds):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"thresholds is a {type(given).__name__}: give a Thresholds, or a mapping of names to numbers"
        )
    names = [field.name for field in fields(Thresholds)]
    for name in given:
        if name not in names:
            raise unknown_choice("threshold", name, names, shown=len(names))
    return Thresholds(**given)  # type: ignore[arg-type]  # __post_init__ looks at the values
