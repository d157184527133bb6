"""How messages count."""


def counted(number: int, noun: str) -> str:
    """`1 sample`, `2 samples`, `3 classes`, `4 replies`."""
    if number == 1:
        return f"{number} {noun}"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"
