"""DistributedDataParallel and fully_shard on two real processes: the record against tensors gathered by hand.

What every rank saw in the same training without statsbridge is the oracle, see `distributed_helpers`.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_helpers import STEPS, batch, loss_of, make_net, run_two, statistics_of
from recording import events, row, rows, scalars
from torch import nn

import statsbridge

DDP = ["plain", "static_graph", "bucket_view"]
FSDP = ["reshard", "keep", "bfloat16"]
PARAMETERS = [name for name, _ in make_net().named_parameters()]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    run_two("ddp(folder)", folder)
    return folder


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    run_two("fsdp(folder)", folder)
    return folder


def load(folder: Path) -> statsbridge.RunData:
    (path,) = folder.iterdir()
    return statsbridge.load(path)


def seen(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"seen-{kind}-{rank}.pt", weights_only=False) for rank in range(2)]


def whole_tensors(folder: Path, kind: str) -> dict[tuple[str, int, str, str], torch.Tensor]:
    """What the rows of `merged()` are about: batches put together, parameters once, updates."""
    first, second = (one["seen"] for one in seen(folder, kind))
    tensors: dict[tuple[str, int, str, str], torch.Tensor] = {}
    for (site, step, module, tensor), value in first.items():
        if site.startswith("activation"):
            tensors[site, step, module, tensor] = torch.cat([value, second[site, step, module, tensor]])
        elif site == "after":
            tensors["update", step, module, tensor] = value - first["parameter", step, module, tensor]
        else:
            assert torch.equal(value, second[site, step, module, tensor])
            tensors[site, step, module, tensor] = value
    return tensors


def check_merged(data: statsbridge.RunData, tensors: dict[tuple[str, int, str, str], torch.Tensor]) -> None:
    """Every row of merged() has the statistics of the whole tensor, and every tensor its row."""
    merged = data.merged().to_pylist()
    keys = [(r["site"], r["step"], r["module"], r["tensor"]) for r in merged]
    assert max(Counter(keys).values()) == 1
    assert {key for key in keys if key[0] != "optimizer_state"} == set(tensors)
    for key, r in zip(keys, merged, strict=True):
        if key[0] == "optimizer_state":
            continue
        assert (r["status"], key) == (None, key)
        for name, expected in statistics_of(tensors[key]).items():
            if r["std"] == 0 and name in ("skewness", "kurtosis"):
                assert r[name] is None
                continue
            unit = {"mean": r["std"] or 1.0}.get(name, 0.0)
            tolerance = 2e-3 if name in ("skewness", "kurtosis") else 2e-5
            # Where float32 or bfloat16 cancels, an update is the difference of two that are far larger.
            assert r[name] == pytest.approx(expected, rel=tolerance, abs=tolerance * (unit or 1e-2)), (key, name)
        assert sum(r["histogram"]) == r["count"]
        if key[0] == "update":
            before = tensors["parameter", *key[1:]].double().norm()
            ratio = float(tensors[key].double().norm() / before)
            assert r["update_ratio"] == (pytest.approx(ratio, rel=1e-5) if before else None)


def check_norms(data: statsbridge.RunData, tensors: dict[tuple[str, int, str, str], torch.Tensor]) -> None:
    """grad_norm_applied, param_norm and update_ratio of the whole model, each once a step."""
    merged = data.merged("scalars")
    assert not any(r["name"].startswith("shard/") for r in merged.to_pylist())
    for step in range(STEPS):
        norms = {
            site: math.sqrt(
                sum(float(x.double().square().sum()) for (s, at, _, _), x in tensors.items() if (s, at) == (site, step))
            )
            for site in ("parameter", "parameter_grad", "update")
        }
        after = math.sqrt(
            sum(
                float((x + tensors["parameter", step, m, t]).double().square().sum())
                for (s, at, m, t), x in tensors.items()
                if (s, at) == ("update", step)
            )
        )
        expected = {
            "grad_norm_applied": norms["parameter_grad"],
            "param_norm": after,
            "update_ratio": norms["update"] / norms["parameter"],
        }
        for name, value in expected.items():
            found = [r for r in merged.to_pylist() if (r["name"], r["step"]) == (name, step)]
            assert [r["value"] for r in found] == [pytest.approx(value, rel=1e-5)], name
            assert (found[0]["shard"], found[0]["shards"]) == (0, 1)


class Joint:
    """The same training in one process that has both ranks' batches."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], **options: float) -> None:
        model = make_net()
        stepper = optimizer(model.parameters(), **options)
        self.activations: dict[tuple[int, str], torch.Tensor] = {}
        self.gradients: dict[tuple[int, str], torch.Tensor] = {}
        self.norms: dict[int, float] = {}
        self.others: dict[str, dict[int, float]] = {"param_norm": {}, "update_ratio": {}}
        for step in range(STEPS):
            handles = [
                module.register_forward_hook(
                    lambda _m, _a, out, key=(step, name): self.activations.__setitem__(key, out.detach().clone())
                )
                for name, module in model.named_modules()
            ]
            stepper.zero_grad()
            loss_of(model(torch.cat([batch(step, 0), batch(step, 1)]))).backward()
            self.norms[step] = float(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                self.gradients[step, name] = parameter.grad.clone()
            before = nn.utils.parameters_to_vector(model.parameters()).detach().double()
            stepper.step()
            after = nn.utils.parameters_to_vector(model.parameters()).detach().double()
            self.others["param_norm"][step] = float(after.norm())
            self.others["update_ratio"][step] = float((after - before).norm() / before.norm())
            for handle in handles:
                handle.remove()

    def check(self, data: statsbridge.RunData) -> None:
        for (step, module), value in self.activations.items():
            self._close(data, step, module, "activation", "", value)
        for (step, name), value in self.gradients.items():
            module, _, tensor = name.rpartition(".")
            self._close(data, step, module, "parameter_grad", tensor, value)
        # What clip_grad_norm_ gave, raw: of all ranks, before clipping.
        assert scalars(data.merged("scalars"), "grad_norm") == pytest.approx(self.norms, rel=1e-4)

    def _close(self, data: statsbridge.RunData, step: int, module: str, site: str, tensor: str, x: Any) -> None:
        for name in ("mean", "l2", "min", "max"):
            series = data.series(module, site, name, tensor=tensor)
            value = dict(zip(series["step"].to_pylist(), series["value"].to_pylist(), strict=True))[step]
            assert value == pytest.approx(statistics_of(x)[name], rel=1e-3, abs=1e-5), (step, module, site, name)


# ---------------------------------------------------------------------- DistributedDataParallel


@pytest.mark.parametrize("kind", DDP)
def test_ddp_is_left_as_it_is_and_its_ranks_merge(kind: str, ddp: Path) -> None:
    for one in seen(ddp, kind):
        assert one["same"], "losses and weights are bit-identical with and without"
        plain, watched = one["collectives"]
        assert watched == plain >= STEPS, "no collective of ours"
    data, tensors = load(ddp / kind), whole_tensors(ddp, kind)
    assert sorted(p.name for p in (data.path / "stats").iterdir()) == ["rank=0", "rank=1"]
    check_merged(data, tensors)
    check_norms(data, tensors)
    Joint(torch.optim.SGD, lr=0.5, momentum=0.9).check(data)


def test_what_ddp_ranks_hold_twice_counts_once(ddp: Path) -> None:
    data = load(ddp / "plain")
    for site in ("parameter", "parameter_grad", "update", "optimizer_state"):
        both = [r for r in rows(data, site=site, step=1) if (r["module"], r["tensor"][:6]) == ("stem", "weight")]
        assert [(r["rank"], r["count"], r["shard"], r["shards"]) for r in both] == [(0, 42, 0, 1), (1, 42, 0, 1)]
        assert both[0]["mean"] == both[1]["mean"]
        (once,) = [r for r in data.merged().to_pylist() if (r["site"], r["step"]) == (site, 1) and r["module"] == "stem"
                   and r["tensor"].startswith("weight")]  # fmt: skip
        assert once == both[0]
    activations = rows(data, site="activation", step=1, module="stem")
    assert [(r["count"], r["shard"], r["shards"]) for r in activations] == [(42, None, None)] * 2
    assert activations[0]["mean"] != activations[1]["mean"]
    # The gradients of activations are those of each rank's own loss: of two ranks twice the joint loss's.
    joint = make_net()
    outputs: list[torch.Tensor] = []
    joint.stem.register_forward_hook(lambda _m, _a, out: (out.retain_grad(), outputs.append(out))[0])
    loss_of(joint(torch.cat([batch(0, 0), batch(0, 1)]))).backward()
    assert outputs[0].grad is not None
    (merged,) = [r for r in data.merged().to_pylist()
                 if (r["site"], r["step"], r["module"]) == ("activation_grad", 0, "stem")]  # fmt: skip
    assert merged["l2"] == pytest.approx(2 * float(outputs[0].grad.norm()), rel=1e-4)


def test_a_ddp_rank_that_samples_and_speaks_alone(ddp: Path) -> None:
    """That both got to the end, with the losses of the others, is said by `ddp` itself."""
    data = load(ddp / "alone")
    assert {(r["rank"], r["step"]) for r in rows(data)} == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 2)}
    assert [event["rank"] for event in events(data, "note")] == [1]
    assert row(data, site="tensor")["rank"] == 1
    merged = [r for r in data.merged().to_pylist() if r["module"] == "stem" and r["tensor"] in ("", "weight")]
    counts = {(r["step"], r["site"]): (r["count"], r["status"]) for r in merged}
    assert counts[0, "activation"] == (84, None)
    assert counts[1, "activation"] == (42, None), "of the rank that has sampled the step"
    assert counts[0, "parameter"] == counts[1, "parameter"] == (42, None)


def test_the_rank_that_is_left_never_waits_for_one_that_died(tmp_path: Path) -> None:
    run_two("dies(folder)", tmp_path, codes=(0, 9))
    data = load(tmp_path / "dies")
    assert sorted({r["step"] for r in rows(data, rank=0)}) == list(range(STEPS + 2))
    assert {r["step"] for r in rows(data, rank=1)} <= set(range(STEPS))
    assert len(events(data, "note")) == 2
    assert data.damaged == ()
    last = [r for r in data.merged().to_pylist() if r["step"] == STEPS + 1 and r["module"] == "stem"]
    assert {r["site"]: r["count"] for r in last if r["tensor"] in ("", "weight")} == {
        "activation": 42, "activation_grad": 42, "parameter": 42, "parameter_grad": 42, "update": 42}  # fmt: skip


# ---------------------------------------------------------------------- fully_shard


@pytest.mark.parametrize("kind", FSDP)
def test_fsdp_is_left_as_it_is_and_its_shards_merge(kind: str, fsdp: Path) -> None:
    for one in seen(fsdp, kind):
        assert one["same"], "losses and weights are bit-identical with and without"
        plain, watched = one["collectives"]
        assert watched == plain >= STEPS, "no collective of ours"
    data, tensors = load(fsdp / kind), whole_tensors(fsdp, kind)
    check_merged(data, tensors)
    check_norms(data, tensors)
    if kind != "bfloat16":
        Joint(torch.optim.AdamW, lr=0.05).check(data)


def test_an_fsdp_rank_records_its_shards_and_says_so(fsdp: Path) -> None:
    data = load(fsdp / "keep")
    held = {"stem": {"weight": (24, 18), "bias": (4, 3)}, "head": {"weight": (7, 0), "bias": (1, 0)}}
    for module, tensors in held.items():
        for tensor, counts in tensors.items():
            for site in ("parameter", "parameter_grad", "update"):
                found = rows(data, module=module, tensor=tensor, site=site, step=1)
                assert [(r["rank"], r["shard"], r["shards"]) for r in found] == [(0, 0, 2), (1, 1, 2)]
                assert tuple(r["count"] for r in found) == counts
                assert [r["status"] for r in found] == [None if count else "empty" for count in counts]
    written = {"Net", "Block", "LayerNorm", "Linear", "Sequential"}
    assert {r["type"] for r in rows(data)} == {r["type"] for r in data.modules.to_pylist()} == written
    # No scalar that is of a shard has the name of one that is of the whole.
    names = {(r["name"], r["shards"]) for r in data.scalars.to_pylist() if "norm" in r["name"] or "ratio" in r["name"]}
    assert names == {
        ("grad_norm", 1),
        ("shard/grad_norm_applied", 2),
        ("shard/param_norm", 2),
        ("shard/param_norm_before", 2),
        ("shard/update_norm", 2),
    }
    states = {r["tensor"]: r for r in data.merged().to_pylist() if (r["site"], r["step"], r["module"]) == (
        "optimizer_state", 2, "stem")}  # fmt: skip
    assert (states["weight.exp_avg"]["count"], states["weight.exp_avg"]["status"]) == (42, None)


def test_order_and_depth_under_fsdp_are_the_models_own(fsdp: Path) -> None:
    places = {r["module"]: (r["order"], r["depth"], r["parameters"]) for r in load(fsdp / "keep").modules.to_pylist()}
    table = statsbridge.trace(make_net(), batch(0, 0))
    assert places == {r["module"]: (r["order"], r["depth"], r["parameters"]) for r in table.to_pylist()}


def test_a_shard_that_was_not_recorded_leaves_no_number(fsdp: Path) -> None:
    """At step 1 rank 1 did not sample: half a parameter is no parameter, half a norm no norm."""
    data = load(fsdp / "alone")
    merged = {(r["step"], r["site"]): r for r in data.merged().to_pylist()
              if r["module"] == "stem" and r["tensor"] in ("", "weight")}  # fmt: skip
    for site in ("parameter", "parameter_grad", "update"):
        assert (merged[0, site]["count"], merged[0, site]["status"]) == (42, None)
        lost = merged[1, site]
        assert (lost["count"], lost["mean"], lost["l2"], lost["update_ratio"]) == (0, None, None, None)
        assert lost["status"] == "shards_missing"
    assert merged[1, "activation"]["count"] == 42
    found = data.merged("scalars")
    assert sorted(scalars(found, "param_norm")) == sorted(scalars(found, "update_ratio")) == [0, 2]
    assert sorted(scalars(found, "shard/param_norm")) == sorted(scalars(found, "shard/update_norm")) == [1]
    assert sorted(scalars(found, "grad_norm_applied")) == [0, 1, 2], "known at each step, sampled or not"


# ---------------------------------------------------------------------- FullyShardedDataParallel


@pytest.mark.slow
def test_the_flat_pieces_of_the_older_fsdp_merge(tmp_path: Path) -> None:
    run_two("fsdp1(folder)", tmp_path)
    joint = Joint(torch.optim.AdamW, lr=0.05)
    for kind in ("FULL_SHARD", "NO_SHARD"):
        data = load(tmp_path / kind)
        joint.check(data)
        cut = rows(data, module="stem", tensor="weight", site="parameter", step=2)
        assert {r["shards"] for r in cut} == ({2} if kind == "FULL_SHARD" else {1})
        merged = data.merged("scalars")
        for name, expected in joint.others.items():
            assert scalars(merged, name) == pytest.approx(expected, rel=1e-4), name
