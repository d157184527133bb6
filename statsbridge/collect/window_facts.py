"""All facts of a sampled step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.optim import Optimizer

from .alike import AlikeOutputs
from .facts import Fact
from .module_facts import ModuleFacts
from .parameter_facts import ParameterFacts
from .rows import Rows


class WindowFacts:
    """Asks all that look for facts when a window closes. What fails there costs the facts of the step, no number."""

    def __init__(
        self,
        modules: ModuleFacts,
        outputs: AlikeOutputs,
        parameters: ParameterFacts,
        trouble: Callable[[str, str, BaseException], None],
    ) -> None:
        self._modules = modules
        self._outputs = outputs
        self._parameters = parameters
        self._trouble = trouble

    def close(
        self, rows: Rows, optimizers: Callable[[], Iterable[Optimizer]], *, stepped: bool
    ) -> Callable[[], list[Fact]]:
        """The window ends: what the background is to call, once its numbers are on the host, to have the facts.

        `optimizers`: the known ones. `stepped`: whether any has stepped in the window. Raises nothing.
        """
        try:
            found = self._parameters.close(optimizers) if stepped else []
            judges = [self._modules.close(rows), self._outputs.close(rows)]
        except Exception as error:
            self._trouble("looking for facts", "", error)
            return list

        def judge() -> list[Fact]:
            try:
                return [*found, *(fact for one in judges for fact in one())]
            except Exception as error:
                self._trouble("judging facts", "", error)
                return []

        return judge
