"""A run in a process that did not begin it, forked or sent there by pickle: it records nothing, and says so."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from ..reporting import Reporter

if TYPE_CHECKING:
    from .recording import Run

_begun: weakref.WeakSet[Run] = weakref.WeakSet()


def leave_in_children(run: Run) -> None:
    """See to it that children forked from here on do not go on with this run: its writer has no thread there.

    A window that stayed open in them would measure all that they train, for nobody, and never let go of it.
    """
    _begun.add(run)


def say_elsewhere() -> None:
    """Warn who closes a step with such a run."""
    Reporter(lambda work: None).warn(
        "this run was begun in another process, and records nothing in this one: call statsbridge.init() in the "
        "process that trains"
    )


def _in_forked_child() -> None:
    for run in list(_begun):
        run._leave()
    _begun.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
