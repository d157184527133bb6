"""The rules: each looks at one step after the other and says what is wrong."""

from __future__ import annotations

from collections.abc import Callable

from ..thresholds import Thresholds
from .accumulation import Accumulation
from .activations import ActivationScale, Saturation, StaleOutputs
from .dead import DeadFunction, DeadUnits
from .facts import Facts, SkippedSteps
from .gradients import GradientAlongDepth, GradientSize
from .loss import InitialLoss, LossCourse, LossSpike
from .nonfinite import NonFinite
from .norms import GradientNormGrowth
from .reach import NoGradient, NoOptimizer
from .step import Rule
from .stepped import NeverStepped
from .underflow import Underflow
from .updates import UpdateMissing, UpdateTooLarge, WeightGrowth

#: What makes each rule from the limits.
RULES: tuple[Callable[[Thresholds], Rule], ...] = (
    NonFinite,
    DeadUnits,
    DeadFunction,
    ActivationScale,
    Saturation,
    StaleOutputs,
    GradientSize,
    GradientAlongDepth,
    GradientNormGrowth,
    Accumulation,
    Underflow,
    UpdateTooLarge,
    WeightGrowth,
    UpdateMissing,
    NoGradient,
    NoOptimizer,
    NeverStepped,
    Facts,
    SkippedSteps,
    LossSpike,
    LossCourse,
    InitialLoss,
)
