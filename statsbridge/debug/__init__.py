"""Before a long run: tests of the model, the data and the learning rate that take a minute."""

from .data import DataResult, check_data
from .data_finding import DataFinding
from .dead_revival import Revival, revive_dead_units
from .dead_units import DeadLayer, DeadUnits, find_dead_units
from .gradients import GradientResult, gradient_check
from .initial_loss import InitialLossResult, initial_loss_check
from .overfit import OverfitResult, overfit_one_batch
from .preflight import PreflightResult, preflight
from .preserving import preserved
from .rate_range import RateRangeResult, learning_rate_range_test
from .result import Result

__all__ = [
    "DataFinding",
    "DataResult",
    "DeadLayer",
    "DeadUnits",
    "GradientResult",
    "InitialLossResult",
    "OverfitResult",
    "PreflightResult",
    "RateRangeResult",
    "Result",
    "Revival",
    "check_data",
    "find_dead_units",
    "gradient_check",
    "initial_loss_check",
    "learning_rate_range_test",
    "overfit_one_batch",
    "preflight",
    "preserved",
    "revive_dead_units",
]
