"""Real processes: killed, forked, distributed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from recording import rows, scalars

import statsbridge

TRAIN = """
    import sys, torch, statsbridge
    from torch import nn
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = statsbridge.init(model, dir=sys.argv[1], every=1, flush_interval=0.05)
    print(run.path, flush=True)
"""
LOOP = """
    for step in range({steps}):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        run.step(loss=loss)
"""


def script(*parts: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(textwrap.dedent(part) for part in parts)]


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """Kill -9: every step that was acknowledged as flushed is there, whole, and once."""
    program = script(
        TRAIN,
        textwrap.dedent(LOOP.format(steps=100_000)).rstrip()
        + "\n    if step % 20 == 19:\n        assert run._writer.flush()\n        print(step, flush=True)\n",
    )
    process = subprocess.Popen([*program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    acknowledged = [int(process.stdout.readline()) for _ in range(5)][-1]
    process.kill()
    process.wait()
    data = statsbridge.load(path)
    losses = scalars(data.scalars, "loss")
    assert set(range(acknowledged + 1)) <= set(losses)
    by_step: dict[int, list[tuple[str, str, str]]] = {}
    for row in rows(data):
        by_step.setdefault(row["step"], []).append((row["module"], row["site"], row["tensor"]))
    assert set(range(acknowledged + 1)) <= set(by_step)
    assert len({tuple(keys) for keys in by_step.values()}) == 1, "every step is whole"
    assert all(len(set(keys)) == len(keys) for keys in by_step.values())
    assert data.damaged == ()


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('at two in the morning')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_a_script_that_never_calls_finish(ending: str, code: int, tmp_path: Path) -> None:
    program = script(TRAIN.replace("flush_interval=0.05", "flush_interval=1000"), LOOP.format(steps=5), ending)
    done = subprocess.run([*program, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "statsbridge" not in done.stderr
    data = statsbridge.load(done.stdout.strip())
    assert sorted(scalars(data.scalars, "loss")) == [0, 1, 2, 3, 4]
    assert {row["step"] for row in rows(data)} == {0, 1, 2, 3, 4}


def test_two_processes_make_one_run(tmp_path: Path) -> None:
    """DDP on gloo: one run, a folder a rank, gradients after the all-reduce, weights as without us."""
    program = script(
        """
        import os, sys, torch, statsbridge
        from torch import nn
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()

        def train(watch):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
            wrapped = nn.parallel.DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            run = statsbridge.init(wrapped, dir=sys.argv[1], every=2) if watch else None
            torch.manual_seed(rank)
            for step in range(4):
                optimizer.zero_grad()
                wrapped(torch.randn(4, 8)).pow(2).mean().backward()
                optimizer.step()
                if run: run.step()
            if run:
                run.finish()
                if rank == 0: print(run.path, flush=True)
            return model

        plain, watched = train(False), train(True)
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters()))
        torch.distributed.destroy_process_group()
        """
    )
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    workers = [
        subprocess.Popen([*program, str(tmp_path)], env={**base, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    output = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    (path,) = tmp_path.iterdir()
    assert output[0].strip() == str(path)
    data = statsbridge.load(path)
    gradients = {
        (r["rank"], r["step"]): (r["mean"], r["std"])
        for r in rows(data, site="parameter_grad", module="0", tensor="weight")
    }
    assert set(gradients) == {(0, 0), (0, 2), (1, 0), (1, 2)}
    assert gradients[0, 0] == gradients[1, 0]
    activations = {(r["rank"], r["step"]): r["mean"] for r in rows(data, site="activation", module="0")}
    assert activations[0, 0] != activations[1, 0]


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_importing_and_reading_need_no_torch(tmp_path: Path) -> None:
    program = script(TRAIN, LOOP.format(steps=2), "run.finish()")
    path = subprocess.run([*program, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    reading = script(
        """
        import sys
        import statsbridge
        assert not {"torch", "pyarrow", "numpy"} & set(sys.modules), "importing is free"
        data = statsbridge.load(sys.argv[1])
        assert data.stats.num_rows and data.scalars.num_rows and "steps" in repr(data)
        assert "torch" not in sys.modules
        """
    )
    subprocess.run([*reading, path], check=True)


def test_data_loader_workers_forked_while_a_run_is_open(tmp_path: Path) -> None:
    program = script(
        TRAIN,
        """
        from torch.utils.data import DataLoader, TensorDataset
        loader = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4, num_workers=2)
        for (x,) in loader:
            loss = model(x).pow(2).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            run.step(loss=loss)
        run.finish()
        """,
    )
    done = subprocess.run([*program, str(tmp_path)], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    data = statsbridge.load(done.stdout.strip())
    assert sorted(scalars(data.scalars, "loss")) == list(range(8))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_that_trains_records_nothing_and_says_so_once(tmp_path: Path) -> None:
    """Its window is closed too: it would measure all that the child trains, for nobody, and hold it for ever."""
    program = script(
        TRAIN,
        """
        import os
        from torch.nn.modules import module
        child = os.fork()
        hooked = len(module._global_forward_hooks)
        """,
        LOOP.format(steps=3),
        """
        if not child:
            assert not hooked, "the child's model is still watched"
            run.log({"a": 1.0})
            run.finish()
            os._exit(0)
        assert hooked and os.waitpid(child, 0)[1] == 0
        run.finish()
        """,
    )
    done = subprocess.run([*program, str(tmp_path)], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("StatsBridgeWarning") == 1
    assert "another process" in done.stderr
    data = statsbridge.load(done.stdout.strip())
    assert scalars(data.scalars, "loss").keys() == {0, 1, 2}
    assert {row["step"] for row in rows(data)} == {0, 1, 2}
    assert not scalars(data.scalars, "a")
