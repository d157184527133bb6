"""What a run folder lets others see: permissions by the umask, no secret, and ids that never collide."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from statsbridge.log import list_runs

TRAIN = """
import os, sys
os.umask(int(sys.argv[2], 8))
import torch, statsbridge
model = torch.nn.Linear(2, 1)
run = statsbridge.init(model, dir=sys.argv[1], every=1, config={"learning_rate": 0.1})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    optimizer.step()
    run.step(loss=loss)
run.finish()
from statsbridge.log.compaction import compact_table
from statsbridge.log.lease import maintenance
with maintenance(run.path):
    compact_table(run.path, "stats", 0, fan_in=2)
"""


@pytest.mark.parametrize("umask", [0o027, 0o077])
def test_folders_and_files_have_the_users_umask_and_hold_no_secret(tmp_path: Path, umask: int):
    secrets = {
        "WANDB_API_KEY": "key-Zq81vX",
        "HF_TOKEN": "token-Jw72pL",
        "AWS_SECRET_ACCESS_KEY": "aws-Rt55kM",
        "SOME_VARIABLE": "value-Uh19cD",
    }
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path / "runs"), oct(umask)[2:], "--password=argument-Bn33sF"],
        env={**os.environ, **secrets},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    paths = [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]
    assert len(paths) > 8
    for path in paths:
        wanted = (0o777 if path.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    everything = b"".join(path.read_bytes() for path in paths if path.is_file())
    for secret in [*secrets, *secrets.values(), "argument-Bn33sF", "--password", os.getcwd(), str(Path.home())]:
        assert secret.encode() not in everything
    [info] = (tmp_path / "runs").glob("*/run.json")
    assert json.loads(info.read_text())["config"] == {"learning_rate": 0.1}


MAKE = """
import sys, time
from datetime import datetime, UTC
from pathlib import Path
from statsbridge.log import create_run
print("ready", flush=True)
sys.stdin.readline()
for _ in range(20):
    before = datetime.now(UTC)
    run = create_run(Path(sys.argv[1]), name=None, config=None, information={})
    print(run.name, before.isoformat(), flush=True)
"""


def test_ids_of_processes_that_start_at_once_differ_and_sort_by_time(tmp_path: Path):
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
    made = []
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
    for program in programs:
        out, _ = program.communicate(timeout=60)
        own = [tuple(line.split()) for line in out.splitlines()]
        assert [name for name, _ in own] == sorted(name for name, _ in own), "a process's own runs sort by time"
        made += own
    assert len({name for name, _ in made}) == 60
    assert [run.id for run in list_runs(tmp_path)] == sorted(name for name, _ in made)
    for name, before in made:
        said = f"{before[:10]}-{before[11:19]}".replace("-", "").replace(":", "")
        assert name.replace("-", "")[:14] >= said[:14], "the id's time is that of its making"


def test_ids_of_twenty_processes_started_in_the_same_moment_differ(tmp_path: Path):
    """As a launcher does: one process forks them all, with the same state of every random generator."""
    source = f"""
import os, sys
from statsbridge.log import create_run
from pathlib import Path
children = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        create_run(Path({str(tmp_path)!r}), name=None, config=None, information={{}})
        os._exit(0)
    children.append(child)
assert not any(os.waitpid(child, 0)[1] for child in children)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list_runs(tmp_path)) == 20
