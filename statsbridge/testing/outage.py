"""The check of an outage: it must be noticed in bounded time, and cost nothing once it is over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from statsbridge.errors import Reject, Retry
from statsbridge.mirror.contract import Adapter

from .made import made_batches, made_run
from .session import Session, compare, expected, read


def check_outage(
    make: Callable[[], Adapter],
    folder: Path,
    outage: Callable[[], AbstractContextManager[object]],
    *,
    bound: float = 60.0,
) -> None:
    """While `outage()` lasts, `send` raises Retry within `bound` seconds; after it the same batch is taken, once."""
    run = made_run(folder)
    batches = made_batches(4)
    session = Session(make(), run, bound=bound)
    session.send(batches[0])
    with outage():
        for _ in range(2):
            _expect_retry(session, batches[1].points[0].step, lambda: session.adapter.send(batches[1]))
    for batch in batches[1:]:
        session.send(batch)
    session.close()
    compare(read(make(), run, session.destination, session.memory), expected(session.adapter, session.acknowledged))


def _expect_retry(session: Session, step: int, send: Callable[[], None]) -> None:
    try:
        session.call("send", send)
    except Retry:
        return
    except Reject as error:
        raise AssertionError(f"an outage is no reason to reject: {error!r}") from error
    raise AssertionError(f"send acknowledged the batch of step {step} during the outage")
