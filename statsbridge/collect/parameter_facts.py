"""Facts about parameters that train in vain: no optimizer holds them, or it holds the ones they have replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.optim import Optimizer

from .facts import Fact, Told
from .kept import Named, Remembered

#: Steps of any optimizer after which one that has not been seen is not there: some step only each fifth time.
FEWEST_OPTIMIZER_STEPS = 8

#: Sampled steps in a row in which it must be so.
FEWEST_STEPS = 2

#: Sampled steps in a row in each of which a parameter is a new one.
FEWEST_RENEWALS = 3

_Place = tuple[int, str]


class ParameterFacts:
    """`no_optimizer` and `parameter_replaced`. All in the training thread; nothing is looked at but identity."""

    def __init__(self) -> None:
        self._ids: tuple[int, ...] = ()
        self._known: dict[_Place, Remembered] = {}
        # Replaced since the last close: by place, the parameter before, and its name.
        self._replaced: dict[_Place, tuple[Remembered, Named]] = {}
        self._renewals: Counter[_Place] = Counter()
        self._renewed: set[_Place] = set()
        self._unheld: dict[_Place, Named] = {}
        self._unheld_steps: Counter[_Place] = Counter()
        self._told_unheld = Told()
        self._told_replaced = Told()
        self.optimizer_steps = 0

    def look(self, parameters: Sequence[tuple[Named, torch.Tensor]]) -> None:
        """The parameters as they are now, but for those that FullyShardedDataParallel makes anew."""
        ids = tuple(id(parameter) for _, parameter in parameters)
        if ids == self._ids and not any(known.gone for known in self._known.values()):
            return  # the usual case: no parameter that was there is gone, so no id means another one
        now = {(name.module.index, name.tensor): (parameter, name) for name, parameter in parameters}
        for place, (parameter, name) in now.items():
            before = self._known.get(place)
            if before is not None and not before.same(parameter):
                self._replaced.setdefault(place, (before, name))
                self._renewed.add(place)
        self._ids = ids
        self._known = {place: Remembered(parameter) for place, (parameter, _) in now.items()}

    def stepped(self, missing: Iterable[tuple[Named, torch.Tensor]]) -> None:
        """An optimizer has stepped in a window, without these parameters."""
        for name, parameter in missing:
            if parameter.requires_grad and parameter.grad is not None:
                self._unheld[name.module.index, name.tensor] = name

    def close(self, optimizers: Callable[[], Iterable[Optimizer]]) -> list[Fact]:
        """A window ends in which one of the known `optimizers` has stepped."""
        if not (self._replaced or self._unheld or self._unheld_steps):
            self._renewals.clear()
            return []
        held = {id(p) for optimizer in optimizers() for group in optimizer.param_groups for p in group["params"]}

        def holds(parameter: Remembered) -> bool:
            return parameter.id in held and not parameter.gone

        return self._find_replaced(holds) + self._find_unheld(holds)

    def _find_replaced(self, holds: Callable[[Remembered], bool]) -> list[Fact]:
        facts = []
        self._renewals = Counter({place: self._renewals[place] + 1 for place in self._renewed})
        for place, (before, name) in self._replaced.items():
            now = self._known.get(place)
            if now is not None and holds(now):
                continue  # and where it is gone already, made anew once more, nobody holds it
            held = holds(before)
            if (held or self._renewals[place] >= FEWEST_RENEWALS) and self._told_replaced.first(place):
                why = (
                    "the optimizer holds the one that was there before, so this one is not trained"
                    if held
                    else "it is made anew again and again, so no optimizer can hold it"
                )
                said = f"{name.tensor} of {name.module.type} is another parameter than before: {why}"
                facts.append(Fact("parameter_replaced", said, name.module.name, "parameter", name.tensor))
        self._replaced.clear()
        self._renewed.clear()
        return facts

    def _find_unheld(self, holds: Callable[[Remembered], bool]) -> list[Fact]:
        facts = []
        unheld = {}
        for place, name in self._unheld.items():
            known = self._known.get(place)
            if known is not None and not known.gone and not holds(known) and place not in self._told_replaced:
                unheld[place] = name
        self._told_unheld.gone([place for place in self._unheld_steps if place not in unheld])
        self._unheld_steps = Counter({place: self._unheld_steps[place] + 1 for place in unheld})
        for place, name in unheld.items():
            sure = self._unheld_steps[place] >= FEWEST_STEPS and self.optimizer_steps >= FEWEST_OPTIMIZER_STEPS
            if sure and self._told_unheld.first(place):
                said = (
                    f"{name.tensor} of {name.module.type} has a gradient, and no optimizer that has stepped so far "
                    "holds it: it is not trained"
                )
                facts.append(Fact("no_optimizer", said, name.module.name, "parameter_grad", name.tensor))
        self._unheld = {}
        return facts
