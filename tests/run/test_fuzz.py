"""Random models and random loops: the same training with and without us, and every number that of an oracle.

Of 300 of them the first 50 are fast tests, the rest slow ones. `FUZZ_MODELS=5000` runs more, `FUZZ_FIRST=17
FUZZ_MODELS=1` one alone.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from depth_oracle import poisoned_depths, table_depths
from fuzz_loops import Loop, Oracle, Output, Step, train
from fuzz_models import TIME, WIDTH, Branch, Checkpointed, make_model
from joins import check_joins
from recording import rows
from torch import nn

import statsbridge
from statsbridge.analyze.rules.words import FACTS, WORDS

USUAL = 300
MODELS = int(os.environ.get("FUZZ_MODELS", USUAL))
FIRST = int(os.environ.get("FUZZ_FIRST", "0"))
IN_ONE_TEST = 25
FAST = 50
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.slow] if MODELS == USUAL and first >= FAST else [])
        for first in range(FIRST, FIRST + MODELS, IN_ONE_TEST)
    ],
)
def test_random_models_in_random_loops(first: int, tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for seed in range(first, min(first + IN_ONE_TEST, FIRST + MODELS)):
        try:
            check_seed(seed, tmp_path / str(seed), found)
        except Exception as error:
            error.add_note(f"seed {seed}: FUZZ_FIRST={seed} FUZZ_MODELS=1")
            raise
    print(dict(found))
    if MODELS >= IN_ONE_TEST:
        assert found["with an oracle"] >= IN_ONE_TEST // 2, f"too few of the models can be trained at all: {found}"
        assert found["without a number"] < found["gradients"] // 4, found


def check_seed(seed: int, folder: Path, found: Counter[str]) -> None:
    loop = Loop.of(seed)
    plain = plainly(loop)
    if plain is None:
        found["not trainable"] += 1  # an in-place change of what autograd needs, say
        return
    found["models"] += 1
    steps, state, said = plain
    runs: list[statsbridge.Run] = []

    def start(model: nn.Module) -> statsbridge.Run:
        runs.append(statsbridge.init(model, dir=folder, every=loop.every, flush_interval=60))
        return runs[-1]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched_steps, watched_state = train(loop, start)
    assert {str(w.message) for w in caught} <= said, "a warning that there is not without us"
    assert same([s.loss for s in steps], [s.loss for s in watched_steps])
    assert same(list(state.values()), list(watched_state.values()))

    path = runs[0].path
    assert path is not None
    data = statsbridge.load(path)
    # Random models have frozen, unused and unreached parts; whether they train well is not asked here.
    assert {e["kind"] for e in data.events.to_pylist()} <= FACTS | WORDS.keys() | {"burst"}
    check_joins(data)
    expected = oracle_steps(loop, steps)
    if expected is None:
        found["without an oracle"] += 1
        return
    found["with an oracle"] += 1
    for number in range(0, loop.steps, loop.every):
        check_step(seed, rows(data, step=number), expected[number], steps[number], found)
    assert {r["step"] for r in rows(data)} == set(range(0, loop.steps, loop.every))
    if seed % 5 == 0:
        check_depth(seed, data, found)


def plainly(loop: Loop) -> tuple[list[Step], dict[str, Any], set[str]] | None:
    """The training without us, and its warnings; None where it fails, or grows beyond all numbers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            steps, state = train(loop)
        except RuntimeError:
            return None
    return (steps, state, {str(w.message) for w in caught}) if all(s.loss.isfinite() for s in steps) else None


def oracle_steps(loop: Loop, plain: list[Step]) -> list[Step] | None:
    """The oracle's steps.

    Gradients of views that were changed later come from a second pass in which views are copies, unless the model
    relies on a view showing what is done to its base: then they stay unknown. None where the model cannot be trained
    without its checkpoints: they hide from autograd that what it needs is changed in place.
    """
    steps = oracle_pass(loop, plain, clone_views=False)
    if steps is not None and any(output.unknown for step in steps for output in step.outputs.values()):
        copied = oracle_pass(loop, plain, clone_views=True)
        if copied is not None and all(alike(a.loss, b.loss) for a, b in zip(copied, plain, strict=True)):
            for step, other in zip(steps, copied, strict=True):
                for key, output in step.outputs.items():
                    if output.unknown and not other.outputs[key].unknown:
                        output.gradients, output.unknown = other.outputs[key].gradients, False
    assert steps is None or all(alike(a.loss, b.loss) for a, b in zip(steps, plain, strict=True))
    return steps


def oracle_pass(loop: Loop, plain: list[Step], clone_views: bool) -> list[Step] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return train(loop, oracle=lambda model: Oracle(model, clone_views), follow=plain)[0]
        except RuntimeError:
            return None


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5)


def check_step(seed: int, table: list[dict[str, Any]], oracle: Step, plain: Step, found: Counter[str]) -> None:
    model, _ = make_model(seed)
    unsure = reentrant(model)
    by_key = {(r["site"], r["module"], r["call"], r["tensor"]): r for r in table}
    assert len(by_key) == len(table), "a row is there twice"
    several = {module for module, call, _ in oracle.outputs if call > 0}
    for (module, call, path), output in oracle.outputs.items():
        row = by_key.pop(("activation", module, call, path))
        if not output.values[0].is_floating_point():
            assert row["status"] == "integer"
            continue
        check_values(row, output.values)
        found["activations"] += 1
        check_gradient(
            by_key.pop(("activation_grad", module, call, path)),
            output,
            module in several and module in unsure,
            found,
        )
    for name, value in plain.parameters.items():
        module, _, tensor = name.rpartition(".")
        check_values(by_key.pop(("parameter", module, 0, tensor)), [value])
        if name in plain.moving:
            gradient = plain.gradients[name]
            row = by_key.pop(("parameter_grad", module, 0, tensor))
            if gradient is None:
                assert row["status"] == "no_grad"
            else:
                check_values(row, [gradient])
            check_values(by_key.pop(("update", module, 0, tensor)), [plain.updates[name]])
            found["parameters"] += 1
    for row in by_key.values():
        assert (row["site"], row["status"], row["mean"]) == ("activation", "not_called", None), row


def check_gradient(row: dict[str, Any], output: Output, unsure: bool, found: Counter[str]) -> None:
    found["gradients"] += 1
    if row["status"] in ("view_modified", "recompute_order_unknown"):
        known = output.owned or not output.view if row["status"] == "view_modified" else not unsure
        assert not known, row
        assert row["mean"] is None
        found["without a number"] += 1
    elif output.unknown:
        found["views that no oracle knows"] += 1
    elif not output.gradients:
        assert (row["status"], row["mean"]) == ("no_grad", None), row
    else:
        check_values(row, output.gradients)


def check_values(row: dict[str, Any], values: list[torch.Tensor]) -> None:
    """A row against float64 numpy. An LSTM in a reentrant checkpoint is rounded otherwise than one outside: 2e-5."""
    x = np.concatenate([value.double().numpy().ravel() for value in values])
    assert (row["status"], row["count"]) == (None, x.size), row
    if not np.isfinite(x).all():
        assert row["nan_count"] + row["inf_count"] == np.count_nonzero(~np.isfinite(x))
        return
    expected = {"mean": x.mean(), "std": x.std(), "min": x.min(), "max": x.max(), "abs_mean": np.abs(x).mean()}
    expected["l2"] = np.linalg.norm(x) / np.sqrt(x.size)
    found = {name: row[name] for name in expected} | {"l2": row["l2"] / np.sqrt(x.size)}
    largest = np.abs(x).max()
    assert all(abs(found[name] - value) <= 2e-5 * largest for name, value in expected.items()), (row, expected)
    assert row["zero_fraction"] == pytest.approx((x == 0).mean(), abs=1e-9)


def reentrant(model: nn.Module) -> set[str]:
    """The modules that run inside a reentrant checkpoint."""
    names = {module: name for name, module in model.named_modules()}
    outer = [m for m in model.modules() if isinstance(m, Checkpointed) and m.reentrant]
    return {names[inner] for checkpointed in outer for inner in checkpointed.inner.modules()}


def check_depth(seed: int, data: statsbridge.RunData, found: Counter[str]) -> None:
    """The depths of the first trace are those that poison shows, unless poison would change the branch taken."""
    model, time = make_model(seed)
    if any(isinstance(module, Branch) for module in model.modules()):
        return
    x = torch.randn(4, TIME, WIDTH) if time else torch.randn(4, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = poisoned_depths(model, x)
    first = data.modules.filter(np.asarray(data.modules["step"]) == min(data.modules["step"].to_pylist()))
    assert table_depths(first) == expected
    found["depths"] += 1


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
