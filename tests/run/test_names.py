"""Names of modules: the prefixes of wrappers are no part of them, and every row finds its module."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from joins import check_joins
from recording import rows
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

import statsbridge

Record = Callable[..., statsbridge.Run]
pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {"", "0", "1", "1.0", "1.1", "1.2", "2"}


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 2))


def checkpointed(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


def eager(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def parallel(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def sharded(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


@pytest.fixture
def process_group() -> Iterator[None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    before = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


def inside(wrap: Callable[[nn.Module], nn.Module], *where: int) -> nn.Module:
    """The model with one of its modules wrapped, in the middle of the tree."""
    model = plain()
    holder: Any = model
    for index in where[:-1]:
        holder = holder[index]
    holder[where[-1]] = wrap(holder[where[-1]])
    return model


WRAPPED: dict[str, Callable[[], Any]] = {
    "module.": lambda: parallel(plain()),
    "_orig_mod.": lambda: eager(plain()),
    "_checkpoint_wrapped_module.": lambda: checkpointed(plain()),
    "_fsdp_wrapped_module.": lambda: sharded(plain()),
    "module._orig_mod.": lambda: parallel(eager(plain())),
    "_orig_mod.module.": lambda: eager(parallel(plain())),
    "module.module.": lambda: nn.DataParallel(nn.DataParallel(plain())),
    "in the middle": lambda: inside(checkpointed, 1),
    "compiled in the middle": lambda: inside(eager, 1),
    "two in the middle": lambda: inside(lambda m: checkpointed(eager(m)), 1, 0),
    "sharded in the middle": lambda: sharded(inside(sharded, 1)),
    "everywhere": lambda: parallel(eager(checkpointed(inside(lambda m: checkpointed(eager(m)), 1)))),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:.*FSDP.*", "ignore:.*NO_SHARD.*", "ignore::FutureWarning")
@pytest.mark.parametrize("prefix", WRAPPED)
def test_prefixes_of_wrappers_are_stripped(prefix: str, record: Record) -> None:
    torch.manual_seed(1)
    model = WRAPPED[prefix]()
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        run.step()
    run.finish()
    data = statsbridge.load(run.path)
    assert check_joins(data) == data.stats.num_rows
    assert {m["module"] for m in data.modules.to_pylist()} == NAMES
    assert {r["module"] for r in rows(data, site="activation", status=None)} == NAMES
    types = {m["module"]: m["type"] for m in data.modules.to_pylist()}
    assert (types[""], types["1"], types["1.1"]) == ("Sequential", "Sequential", "ReLU")
    gradients = {(r["module"], r["tensor"]) for r in rows(data, site="parameter_grad", status=None)}
    assert gradients == {(name, tensor) for name in ("0", "1.0", "1.2", "2") for tensor in ("weight", "bias")}


def test_a_module_that_is_only_named_like_a_wrapper_keeps_its_name(record: Record) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 4)
            self.other = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> Any:
            return self.other(self.module(x))

    model = Holder()
    run = record(model)
    model(torch.randn(2, 4)).sum().backward()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)
    assert check_joins(data, wrapped=False) == data.stats.num_rows
    assert {m["module"] for m in data.modules.to_pylist()} == {"", "module", "other", "other.0"}


def test_the_checker_notices_a_row_without_its_module(record: Record) -> None:
    model = plain()
    run = record(model)
    model(torch.randn(2, 4)).sum().backward()
    run.step()
    run.finish()
    data = statsbridge.load(run.path)

    class Lacking:
        modules = data.modules.filter([m["module"] != "1.1" for m in data.modules.to_pylist()])
        stats = data.stats

    with pytest.raises(AssertionError):
        check_joins(Lacking())  # type: ignore[arg-type]
