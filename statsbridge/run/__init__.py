"""`init()` and `Run`: the only place that knows every room. Errors belong to `init()`, never to a step."""

from .recording import Run
from .starting import init

__all__ = ["Run", "init"]
