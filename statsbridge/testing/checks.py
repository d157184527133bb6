"""Checks that need no second process: names, values, order, replays."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from statsbridge.mirror.contract import Adapter, Batch

from .crash import check_crash, check_destination
from .made import HARD_NAMES, HARD_VALUES, made_batches, made_event, made_histogram, made_point, made_run, made_series
from .outage import check_outage
from .session import Session, compare, expected, read, same


def check_adapter(
    make: Callable[[], Adapter],
    folder: Path,
    *,
    outage: Callable[[], AbstractContextManager[object]] | None = None,
    bound: float = 60.0,
) -> None:
    """All checks, one after the other.

    `outage()` is a context in which the tracker cannot be reached; None: the tracker has no such state.
    `bound`: seconds within which `send` must give up during an outage.
    """
    check_destination(make)
    check_key(make)
    check_names(make, folder)
    check_values(make, folder)
    check_steps(make, folder)
    check_order(make, folder)
    check_channels(make, folder)
    check_replay(make, folder)
    check_crash(make, folder)
    if outage is not None:
        check_outage(make, folder, outage, bound=bound)


def check_key(make: Callable[[], Adapter]) -> None:
    """`key` is pure and injective, `options` makes the same adapter again, `keeps` and `backend` are set."""
    adapter = make()
    assert adapter.keeps in {"all", "last"}, f"keeps is {adapter.keeps!r}, not 'all' or 'last'"
    assert adapter.backend, "backend is empty: it is the name of the entry point"
    options = adapter.options()
    assert json.loads(json.dumps(options)) == options, f"options() is not JSON: {options!r}"
    again = type(adapter)(**options)
    assert again.options() == options, f"{options!r} makes an adapter whose options() are {again.options()!r}"
    assert again.destination().address == adapter.destination().address, "options() makes an adapter for elsewhere"

    curves = {made_series(name, statistic=statistic) for name in HARD_NAMES for statistic in (False, True)}
    curves |= {made_series(f"a{chr(code)}b") for code in range(0x10000) if chr(code).isprintable()}
    keys: dict[str, str] = {}
    for curve in curves:
        key = adapter.key(curve)
        assert isinstance(key, str), f"key() of {curve.name!r} is {key!r}, not a string"
        assert key == adapter.key(curve) == again.key(curve), f"key() of {curve.name!r} is not always the same"
        other = keys.setdefault(key, curve.name)
        assert other == curve.name, f"{other!r} and {curve.name!r} both have the key {key!r}"


def check_names(make: Callable[[], Adapter], folder: Path) -> None:
    """Curves of any name arrive, each for itself, even where names differ in one character only."""
    names = dict.fromkeys(HARD_NAMES)
    points = [made_point(made_series(name), 0, float(number)) for number, name in enumerate(names)]
    points += [made_point(made_series(name, statistic=True), 0, number + 0.5) for number, name in enumerate(names)]
    _deliver(make, folder, [Batch(points=points)])


def check_values(make: Callable[[], Adapter], folder: Path) -> None:
    """Each value is in the store as `stored` says, bit for bit; ordinary ones to a millionth at least."""
    adapter = make()
    for value in HARD_VALUES:
        kept = adapter.stored(value)
        assert same(adapter.stored(kept), kept), f"stored({value!r}) is {kept!r}, which is stored differently again"
        if 1e-30 < abs(value) < 1e30:
            assert math.isclose(kept, value, rel_tol=1e-6), f"stored({value!r}) is {kept!r}"
    points = [made_point(made_series("values"), step, value) for step, value in enumerate(HARD_VALUES)]
    names = made_series("a module", statistic=True), made_series("another")
    points += [made_point(series, 100, value) for series, value in zip(names, (math.nan, -0.0), strict=True)]
    _deliver(make, folder, [Batch(points=points)])


def check_steps(make: Callable[[], Adapter], folder: Path) -> None:
    """Steps far apart and up to 2**53 are exact; several values at one step are kept as `keeps` says."""
    loss, other = made_series("loss"), made_series("other", statistic=True)
    steps = [0, 1, 2, 5, 1000, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**53]
    far = [made_point(curve, step, step / 3) for step in steps for curve in (loss, other)]
    twice = [
        made_point(loss, 7, 1.0),
        made_point(loss, 7, 2.0, late=1),
        made_point(loss, 8, 3.0),
        made_point(other, 8, 4.0),
    ]
    _deliver(make, folder, [Batch(points=[point]) for point in far])
    _deliver(make, folder, [Batch(points=twice), Batch(points=[made_point(loss, 8, 5.0, late=1)])])


def check_order(make: Callable[[], Adapter], folder: Path) -> None:
    """What the user logs late, for an earlier step, is kept or rejected, and costs no other value."""
    curve, late = made_series("loss"), made_series("late")
    batches: list[Batch] = []
    for step in range(0, 100, 10):
        batches.append(Batch(points=[made_point(curve, step, step / 7)]))
        if step % 30 == 20:
            batches.append(Batch(points=[made_point(late, step - 15, float(step), late=20)]))
            batches.append(Batch(points=[made_point(curve, step - 15, -float(step), late=20)]))
    _deliver(make, folder, batches)


def check_channels(make: Callable[[], Adapter], folder: Path) -> None:
    """Histograms, events, a figure and a folder are taken, or not, and no value is lost or added by them."""
    run = made_run(folder)
    keepsake = run.path / "kept" / "below"
    keepsake.mkdir(parents=True)
    (keepsake / "part.bin").write_bytes(b"0" * 1000)
    session = Session(make(), run)
    adapter = session.adapter
    for batch in made_batches(3):
        session.send(Batch(batch.points, [made_histogram(batch.points[-1].step)]))
    session.send(Batch(histograms=[made_histogram(6)]))
    for event in (made_event(3), made_event(4, kind="note"), made_event(None)):
        session.call("alert", adapter.alert, event)
    figure = _figure()
    if figure is not None:
        session.call("figure", adapter.figure, "depth × step/activation.std", figure, 5)
        session.call("figure", adapter.figure, "depth × step/activation.std", figure, 6)
    session.call("artifact", adapter.artifact, run.path / "kept")
    session.close()
    found = read(make(), run, session.destination, session.memory)
    compare(found, expected(adapter, session.acknowledged))


def check_replay(make: Callable[[], Adapter], folder: Path) -> None:
    """Batches that come again, after the record of their being acknowledged was lost, change nothing."""
    run, batches = made_run(folder), made_batches(6)
    session = Session(make(), run)
    destination = session.destination
    session.send(batches[0])
    kept = dict(session.memory)
    for batch in batches[1:4]:
        session.send(batch)
    session.close("stopped")

    session = Session(make(), run, destination=destination, memory=kept)
    for batch in batches[1:]:
        session.send(batch)
    session.close()
    wanted = expected(session.adapter, [point for batch in batches for point in batch.points])
    compare(read(make(), run, destination, session.memory), wanted)

    again = Session(make(), run, destination=destination, memory=dict(session.memory))
    again.close()
    compare(read(make(), run, destination, again.memory), wanted)


def _deliver(make: Callable[[], Adapter], folder: Path, batches: list[Batch]) -> None:
    """Send, close, and compare with what a fresh adapter reads."""
    run = made_run(folder)
    session = Session(make(), run)
    for batch in batches:
        session.send(batch)
    session.close()
    assert session.acknowledged, "the adapter rejected all there was"
    found = read(make(), run, session.destination, session.memory)
    wanted = expected(session.adapter, session.acknowledged)
    compare(found, wanted)


def _figure() -> Any:
    """A small heat map; None where Plotly is not installed."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        return None
    return go.Figure(go.Heatmap(z=[[1.0, 2.0], [3.0, None]], x=[0, 10], y=["blocks.0", "blocks.1"]))
