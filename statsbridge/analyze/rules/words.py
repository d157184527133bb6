"""What each kind of finding probably comes from, and what to try: the likeliest first."""

from __future__ import annotations

from collections.abc import Mapping

from .words_numbers import NUMBERS, Words
from .words_training import TRAINING

#: Events of the collector that say what statistics cannot show.
FACTS = frozenset(
    {
        "eval_mode",
        "module_eval",
        "no_optimizer",
        "parameter_replaced",
        "running_statistics_unchanged",
        "identical_outputs",
        "optimizer_step_skipped",
    }
)

WORDS: Mapping[str, Words] = {**NUMBERS, **TRAINING}
