"""How messages count, and show what they were given."""

import reprlib
from numbers import Number


def counted(number: int, noun: str) -> str:
    """`1 sample`, `2 samples`, `3 classes`, `4 replies`."""
    if number == 1:
        return f"{number} {noun}"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def shown(value: object) -> str:
    """A value in a few words. Of a tensor not what is in it, for which one would have to wait."""
    kind = type(value).__name__
    try:
        shape = getattr(value, "shape", None)
        if shape is None or isinstance(value, Number):
            return f"{reprlib.repr(value)} ({kind})"
        return f"{kind} of shape {tuple(shape)}"
    except Exception:  # a nested tensor has no shape, a whole number of many digits no text
        return kind
