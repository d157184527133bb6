"""What to collect: sites, modules and statistics, chosen by glob patterns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from ..errors import ConfigError
from .statistics import STATISTICS

#: Sites in data-flow order of one training step; rows of a step are written in this order.
SITES = (
    "activation",
    "activation_grad",
    "parameter",
    "parameter_grad",
    "update",
    "optimizer_state",
    "tensor",
    "tensor_grad",
)
#: Collected unless `sites` says otherwise; `optimizer_state` has to be asked for, hand-logged tensors always count.
DEFAULT_SITES = SITES[:5]

Patterns = str | Iterable[str]


@dataclass(frozen=True, slots=True)
class Filters:
    """The chosen sites and statistics, and the patterns a module's path must match one of."""

    sites: frozenset[str]
    modules: tuple[str, ...]
    statistics: frozenset[str]

    def module(self, name: str) -> bool:
        """Whether the module with this dotted path was chosen."""
        return any(fnmatchcase(name, pattern) for pattern in self.modules)


def as_patterns(value: Patterns, argument: str) -> tuple[str, ...]:
    """One pattern or several as a tuple; ConfigError where it is neither a text nor several."""
    try:
        patterns = (value,) if isinstance(value, str) else tuple(value)
    except TypeError:
        patterns = ()
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"{argument}={value!r}: give a name, a glob pattern such as 'conv*', or a list of them")
    return patterns


def choose(value: Patterns, argument: str, choices: Sequence[str]) -> frozenset[str]:
    """Those of `choices` that match one of the patterns; ConfigError for a pattern that matches none."""
    chosen: set[str] = set()
    for pattern in as_patterns(value, argument):
        matching = [choice for choice in choices if fnmatchcase(choice, pattern)]
        if not matching:
            near = get_close_matches(pattern, choices, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{argument}: {pattern!r} matches none of {', '.join(choices)}{hint}")
        chosen.update(matching)
    return frozenset(chosen)


def make_filters(
    sites: Patterns | None, modules: Patterns, statistics: Patterns, module_names: Sequence[str]
) -> Filters:
    """Check the user's choice against what there is. Raises ConfigError, naming the valid choices."""
    chosen_sites = frozenset(DEFAULT_SITES) if sites is None else choose(sites, "sites", SITES)
    patterns = as_patterns(modules, "modules")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in module_names):
            near = get_close_matches(pattern, module_names, n=3) or list(module_names[:6])
            raise ConfigError(
                f"modules: {pattern!r} matches none of the model's {len(module_names)} modules, "
                f"such as {', '.join(map(repr, near))}"
            )
    return Filters(chosen_sites, patterns, choose(statistics, "statistics", STATISTICS))
