"""Processes that train one model together stop at the same step, and at the same test."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from statsbridge.debug.ranks import shared

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

# Rank 0 has two samples, which are learnt in a few steps, and rank 1 has twenty-four.
PROGRAM = """
import datetime, json, os, sys
import torch
from torch import nn
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from statsbridge import debug

folder, test, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
init_process_group(
    "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
if test == "fully_shard":
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
else:
    model = DistributedDataParallel(model)
samples = 24 if rank else 2
generator = torch.Generator().manual_seed(rank)
inputs = torch.randn(samples, 4, generator=generator)
targets = torch.randint(0, 3, (samples,), generator=generator)
loss = nn.CrossEntropyLoss()
if test == "fully_shard":
    before = float(loss(model(inputs), targets))  # which leaves the parameters gathered
    debug.initial_loss_check(model, loss, (inputs, targets))
    debug.find_dead_units(model, loss, [(inputs, targets)])
    debug.learning_rate_range_test(model, loss, [(inputs, targets)], steps=20)
    result = debug.overfit_one_batch(model, loss, (inputs, targets))
    assert float(loss(model(inputs), targets)) == before
elif test == "overfit":
    result = debug.overfit_one_batch(model, loss, (inputs, targets))
elif test == "learning rate":
    made = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    result = debug.learning_rate_range_test(model, loss, [(inputs, targets)], optimizer=made, highest=1e4)
else:
    inputs = torch.randn(24, 4, generator=generator)
    inputs[5, 1] = float("nan") if rank else 0.0
    result = debug.preflight(model, loss, DataLoader(TensorDataset(inputs, torch.arange(24) % 3), 8, shuffle=True))
print(json.dumps([result.passed, result.numbers, result.explanation]), flush=True)
os._exit(0)
"""


def outcomes(folder: Path, test: str) -> list[str]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder), test, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    return [out for out, _ in ended]


@pytest.mark.parametrize("test", ["overfit", "learning rate", "fully_shard"])
def test_both_ranks_end_together_and_say_the_same(tmp_path: Path, test: str) -> None:
    first, second = outcomes(tmp_path, test)
    assert first == second
    assert first.startswith("[true")


def test_a_checklist_that_fails_in_one_process_ends_in_all(tmp_path: Path) -> None:
    first, second = outcomes(tmp_path, "preflight")
    assert "NaN" in second
    assert "another process failed this test" in first
    assert first.startswith("[false")
    assert second.startswith("[false")


def test_one_process_decides_alone() -> None:
    assert shared(1.5, nn.Linear(2, 2)) == 1.5
