"""Two processes that train together, with and without statsbridge, and what the whole tensors really were.

Each rank runs `ddp` or `fsdp` and leaves what it saw in `seen-<name>-<rank>.pt`; the tests hold the record against it.
The oracle is the run without statsbridge: same seeds, same bits, and there the test itself may gather tensors.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mirror_helpers import start_python
from torch import nn

import statsbridge

STEPS = 3
ROWS = 6  # of each rank's batch


class Block(nn.Module):
    """A residual block; its normalisation has no parameters that could be cut evenly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.inner(self.norm(x)))


class Net(nn.Module):
    """Of two shards: one of 7 rows is uneven, one of a single row is empty; two layers share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 7)
        self.blocks = nn.Sequential(Block(7), Block(7))
        self.tied = nn.Linear(7, 7)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.tied.weight
        self.head = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(torch.tanh(self.tied(self.blocks(self.stem(x))))))


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output.float() - 0.5).pow(2).mean()


def run_two(call: str, folder: Path, codes: tuple[int, int] = (0, 0)) -> None:
    """Run `distributed_helpers.<call>` on two ranks; one that ends otherwise fails the test with what it said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(2):
        ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
        source = (
            f"import os, sys; os.environ.update({ranks!r})\n"
            "import torch, distributed_helpers as helpers\n"
            "from pathlib import Path\n"
            "torch.set_num_threads(1)\n"
            "torch.distributed.init_process_group('gloo')\n"
            "folder = Path(sys.argv[1])\n"
            f"helpers.{call}\n"
            "torch.distributed.destroy_process_group()\n"
        )
        workers.append(start_python(source, folder, folder))
    try:
        said = [worker.communicate(timeout=240)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, text, code in zip(workers, said, codes, strict=True):
        assert worker.returncode == code, text
        assert "StatsBridgeWarning" not in text, text


def collectives() -> int:
    """How many collectives this process has begun in the group of all, as the backend itself counts them."""
    group: Any = torch.distributed.group.WORLD
    return int(group._get_sequence_number_for_group())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    run: statsbridge.Run | None = None,
    before: Callable[[int], None] = lambda step: None,
    stepping: Callable[[int], None] = lambda step: None,
    stepped: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Some steps, alike whoever watches; the losses."""
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(STEPS):
        before(step)
        optimizer.zero_grad()
        loss = loss_of(model(batch(step, rank)))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        stepping(step)
        optimizer.step()
        stepped(step)
        if run is not None:
            run.step(loss=loss, grad_norm=norm)
        losses.append(loss.item())
    return losses


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor, gathered from the ranks where it lies on several."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if gather is not None else tensor).clone()


Seen = dict[tuple[str, int, str, str], torch.Tensor]


def watch_by_hand(model: nn.Module, seen: Seen) -> dict[str, Any]:
    """Hooks and callbacks for `train` that note every tensor, by (site, step, module, tensor)."""
    step_now = [0]

    def hook(name: str) -> Callable[..., None]:
        def after(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            if not torch.is_grad_enabled():
                return
            step = step_now[0]
            seen["activation", step, name, ""] = output.detach().clone()
            output.register_hook(lambda g: seen.__setitem__(("activation_grad", step, name, ""), g.clone()))

        return after

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))

    def note(site: str, step: int) -> None:
        for path, parameter in model.named_parameters():
            module, _, tensor = path.rpartition(".")
            value = parameter.grad if site == "parameter_grad" else parameter
            if value is not None:
                seen[site, step, module, tensor] = whole(value)

    def stepping(step: int) -> None:
        note("parameter", step)
        note("parameter_grad", step)

    def stepped(step: int) -> None:
        note("after", step)

    return {"before": lambda step: step_now.__setitem__(0, step), "stepping": stepping, "stepped": stepped}


def ddp(folder: Path) -> None:
    """DistributedDataParallel in three kinds: watched by hand, and by statsbridge."""
    rank = torch.distributed.get_rank()
    for kind, options in {
        "plain": {},
        "static_graph": {"static_graph": True},
        "bucket_view": {"gradient_as_bucket_view": True},
    }.items():

        def made(options: dict[str, Any] = options) -> tuple[nn.Module, torch.optim.Optimizer]:
            wrapped = nn.parallel.DistributedDataParallel(make_net(), **options)
            return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.5, momentum=0.9)

        seen: Seen = {}
        model, optimizer = made()
        start = collectives()
        losses = train(model, optimizer, **watch_by_hand(model.module, seen))
        plain = collectives() - start

        watched, other = made()
        sites = ["*"]
        run = statsbridge.init(watched, dir=folder / kind, every=1, sites=sites, histograms=True)
        start = collectives()
        losses_watched = train(watched, other, run=run)
        run.finish()
        counts = (plain, collectives() - start)
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), watched.parameters(), strict=True))
        result = {"seen": seen, "same": same and losses == losses_watched, "collectives": counts}
        torch.save(result, folder / f"seen-{kind}-{rank}.pt")

    watched, other = made()
    alone = statsbridge.init(watched, dir=folder / "alone", every=rank + 1)
    start = collectives()
    if rank == 1:
        alone.note("rank 1 says something that rank 0 does not")
        alone.log({"val/loss": float("nan")})
        alone.log_tensor("mine", torch.ones(3))
    losses = train(watched, other, run=alone)
    alone.finish()
    assert collectives() - start == plain
    assert losses == losses_watched


def fsdp(folder: Path) -> None:
    """`fully_shard`: gathering parameters again or keeping them, and in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank = torch.distributed.get_rank()
    kinds: dict[str, dict[str, Any]] = {
        "reshard": {},
        "keep": {"reshard_after_forward": False},
        "bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    }
    for kind, options in kinds.items():

        def made(options: dict[str, Any] = options) -> tuple[nn.Module, torch.optim.Optimizer]:
            net = make_net()
            for block in net.blocks:
                fully_shard(block, **options)
            fully_shard(net, **options)
            return net, torch.optim.AdamW(net.parameters(), lr=0.05)

        seen: Seen = {}
        model, optimizer = made()
        hands = watch_by_hand(model, seen)
        losses = train(model, optimizer, **hands)

        model, optimizer = made()
        start = collectives()
        train(model, optimizer, before=validate(model))
        plain = collectives() - start

        watched, other = made()
        run = statsbridge.init(watched, dir=folder / kind, every=1, sites=["*"], histograms=True)
        start = collectives()
        losses_watched = train(watched, other, run=run, before=validate(watched))
        run.finish()
        counts = (plain, collectives() - start)
        same = all(
            torch.equal(a.to_local(), b.to_local())  # type: ignore[attr-defined]
            for a, b in zip(model.parameters(), watched.parameters(), strict=True)
        )
        result = {"seen": seen, "same": same and losses == losses_watched, "collectives": counts}
        torch.save(result, folder / f"seen-{kind}-{rank}.pt")

    watched, other = made(kinds["reshard"])
    alone = statsbridge.init(watched, dir=folder / "alone", every=rank + 1)
    train(watched, other, run=alone)
    alone.finish()


def fsdp1(folder: Path) -> None:
    """FullyShardedDataParallel, the older kind: its parameters are flat pieces that no tensor tells of."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    device = torch.device("cpu")
    for kind in ("FULL_SHARD", "NO_SHARD"):
        options: Any = {"use_orig_params": True, "device_id": device, "sharding_strategy": ShardingStrategy[kind]}
        net = make_net()
        net.blocks[1] = FullyShardedDataParallel(net.blocks[1], **options)
        model = FullyShardedDataParallel(net, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        run = statsbridge.init(model, dir=folder / kind, every=1, histograms=True)
        for step in range(STEPS):
            validate(model)(step)
            optimizer.zero_grad()
            loss = loss_of(model(batch(step, torch.distributed.get_rank())))
            loss.backward()
            norm = model.clip_grad_norm_(0.3)
            optimizer.step()
            run.step(loss=loss, grad_norm=norm)
        run.finish()


def dies(folder: Path) -> None:
    """Rank 1 is gone in the middle of a sampled step; rank 0 knows, and goes on alone to the end of its run."""
    rank = torch.distributed.get_rank()
    model = nn.parallel.DistributedDataParallel(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = statsbridge.init(model, dir=folder / "dies", every=1, flush_interval=0.01)
    train(model, optimizer, run=run)
    with (folder / "alive").open("w") as alive:
        if rank == 1:
            fcntl.flock(alive, fcntl.LOCK_EX)
        torch.distributed.barrier()
        if rank == 1:
            model(batch(STEPS, rank))
            os._exit(9)
        fcntl.flock(alive, fcntl.LOCK_EX)
        for step in (STEPS, STEPS + 1):
            optimizer.zero_grad()
            loss = loss_of(model.module(batch(step, rank)))
            loss.backward()
            optimizer.step()
            run.log_tensor("output", torch.ones(5))
            run.log({"val/loss": loss})
            run.note("alone")
            run.step(loss=loss)
        run.finish()
    os._exit(0)  # the group of both cannot be left in order


def validate(model: nn.Module) -> Callable[[int], None]:
    """A forward pass without gradients before each step: it leaves gathered parameters behind."""

    def before(step: int) -> None:
        with torch.no_grad():
            model(batch(1000 + step, 0))

    return before


def statistics_of(tensor: torch.Tensor) -> dict[str, float | None]:
    """The statistics of a tensor in float64, by their definitions."""
    x = tensor.detach().double().numpy().reshape(-1)
    mean, std = x.mean(), x.std()
    moments = [float(((x - mean) ** n).mean()) for n in (3, 4)]
    return {
        "count": x.size,
        "nan_count": 0,
        "inf_count": 0,
        "mean": float(mean),
        "std": float(std),
        "skewness": moments[0] / std**3 if std else None,
        "kurtosis": moments[1] / std**4 - 3 if std else None,
        "min": float(x.min()),
        "max": float(x.max()),
        "abs_mean": float(np.abs(x).mean()),
        "l2": float(np.sqrt((x**2).sum())),
        "zero_fraction": float((x == 0).mean()),
    }
