"""A restricted run in a process in which every use of the network and every import of a tracker raises."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

import pytest
import torch
from mirror_helpers import JsonLines, lines
from recording import Small

import statsbridge
from statsbridge.mirror import Destination, RunInfo
from statsbridge.mirror.audit import read_audit
from statsbridge.mirror.hashing import Namer, load_key

HEAD = """
import json
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch
from torch import nn

import statsbridge

TRACKERS = {"mlflow", "wandb", "aim", "tensorboard"}


class Forbidden(Loader):
    def create_module(self, spec):
        raise AssertionError(f"{spec.name} was imported")

    def exec_module(self, module):
        raise AssertionError


class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, Forbidden()) if name.partition(".")[0] in TRACKERS else None


def no_sockets(event, arguments):
    # The host's own name is looked up for the record on disk, which opens no socket.
    if event.startswith("socket.") and event != "socket.gethostname":
        raise AssertionError(f"{event}{arguments}")


sys.meta_path.insert(0, Finder())
sys.addaudithook(no_sockets)


def train(**arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = statsbridge.init(model, every=1, restricted=True, name="secret name", config={"secret": 1}, **arguments)
    for step in range(5):
        loss = model(torch.randn(16, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss, secret_scalar=float(step))
    run.note("a secret note")
    run.finish()
    return run


class Lines:
    backend, keeps, requires = "lines", "all", ""

    def __init__(self, target):
        self.folder = Path(target).absolute()

    def options(self):
        return {"target": str(self.folder)}

    def destination(self):
        from statsbridge.mirror import Destination

        return Destination("lines", str(self.folder), explicit=True)

    def open(self, run, destination, memory):
        self.folder.mkdir(exist_ok=True)
        self.file = open(self.folder / f"{run.name}.jsonl", "a")
        self.write(run.config, run.versions, run.name)

    def write(self, *values):
        self.file.write(json.dumps([str(value) for value in values]) + "\\n")
        self.file.flush()

    def key(self, series):
        return series.name

    def stored(self, value):
        return value

    def send(self, batch):
        for point in batch.points:
            self.write(point.series, point.step, point.time, point.value)
        for histogram in batch.histograms:
            self.write(histogram.series, histogram.step)

    def alert(self, event):
        self.write(event)

    def figure(self, name, figure, step):
        self.write(name, figure.to_json())

    def artifact(self, path):
        self.write(path)

    def close(self, status):
        self.file.close()
"""

REFUSED = """
file = Path("statsbridge-policy.toml")
refusals = []
for policy, backends in json.loads(sys.argv[1]):
    file.unlink(missing_ok=True)
    if policy is not None:
        file.write_text(policy)
    for backend in backends:
        try:
            train(backend=backend)
        except statsbridge.PolicyError as error:
            refusals.append(str(error))
        else:
            raise AssertionError(f"{backend} was let through")
assert not TRACKERS & set(sys.modules), TRACKERS & set(sys.modules)
print(json.dumps({"refusals": refusals, "local": str(train(backend="local").path)}))
"""

MIRRORED = """
print(json.dumps(str(train(backend=["local", Lines(sys.argv[1])], mirror=statsbridge.Selection(artifact=True)).path)))
"""

POLICY = """
[[destinations]]
backend = "mlflow"
url = "https://mlflow.lab.example"

[[destinations]]
backend = "lines"
path = "mirror"
names = "hashed"
channels = ["metrics", "histograms", "alerts", "figures", "artifacts"]
"""


def run_program(program: str, folder: Path, *arguments: str) -> object:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program, *arguments],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "STATSBRIDGE_POLICY"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_whole_record(path: str) -> statsbridge.RunData:
    """Everything is in the local record, in plain words."""
    data = statsbridge.load(path)
    assert data.info["restricted"] is True
    assert data.info["name"] == "secret name"
    assert data.info["config"] == {"secret": 1}
    assert set(data.stats["step"].to_pylist()) == set(range(5))
    assert set(data.stats["site"].to_pylist()) == {
        "activation", "activation_grad", "parameter", "parameter_grad", "update",
    }  # fmt: skip
    assert set(data.modules["module"].to_pylist()) == {"", "0", "1", "2"}
    values = dict(zip(data.scalars["name"].to_pylist(), data.scalars["value"].to_pylist(), strict=True))
    assert values["secret_scalar"] == 4.0
    assert data.events["message"].to_pylist() == ["a secret note"]
    return data


def test_refused_before_any_tracker_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "statsbridge-policy.toml"
    lab = "mlflow:https://mlflow.lab.example"
    wrong_host = f"policy {file}: not by [[destinations]] 1 (mlflow at https://mlflow.lab.example): its host is "
    cases = [
        (POLICY, "mlflow", "must name its destination"),
        (POLICY, f"{lab}.evil.com", wrong_host),
        (POLICY, "mlflow:https://mlflow.lab@evil.com", str(file)),
        (POLICY, "mlflow:https://MLFLOW.lab.example", f"policy {file} must judge"),
        (POLICY, f"{lab}:8443", "its port is 8443, not the default"),
        (POLICY, "mlflow:http://mlflow.lab.example", "its scheme is http, not https"),
        (POLICY, "wandb", "must name its destination"),
        (POLICY, "wandb:https://api.wandb.ai", f"policy {file}: none of its 2 [[destinations]] is for wandb"),
        (POLICY, f"aim:{tmp_path}", f"policy {file}: none of its 2 [[destinations]] is for aim"),
        (None, lab, "no policy file lists any destination"),
        (None, "wandb", "no policy file lists any destination"),
        (None, f"tensorboard:{tmp_path}", "no policy file lists any destination"),
        ("destination = []", lab, f"policy {file}: unknown key 'destination'"),
        ("[[", lab, f"policy {file} is no TOML"),
    ]
    told = run_program(REFUSED, tmp_path, json.dumps([(policy, [backend]) for policy, backend, _ in cases]))
    assert isinstance(told, dict)
    for refusal, (_, backend, expected) in zip(told["refusals"], cases, strict=True):
        assert expected in refusal, backend
    check_whole_record(told["local"])
    # What was refused has left no folder behind either.
    assert [str(path) for path in (tmp_path / "statsbridge-runs").iterdir()] == [told["local"]]
    assert read_audit(Path(told["local"])).num_rows == 0


def test_what_is_let_out_is_hashed_and_written_down(tmp_path: Path) -> None:
    (tmp_path / "statsbridge-policy.toml").write_text(POLICY)
    path = run_program(MIRRORED, tmp_path, "mirror")
    data = check_whole_record(str(path))
    (file,) = (tmp_path / "mirror").iterdir()
    sent = file.read_text()
    assert file.name == f"{data.id}.jsonl"
    for hidden in ("secret", "Linear", "ReLU", "weight", "bias", "module='0'", " 0.", str(tmp_path), "torch"):
        assert hidden not in sent, hidden
    for hidden in (socket.gethostname(), getpass.getuser()):
        assert len(hidden) < 5 or hidden not in sent  # a short one is in there by accident
    lines = [json.loads(line) for line in sent.splitlines()]
    assert lines[0] == ["{}", "{}", data.id]
    assert "\\u00b7 module-" in sent  # a row of a figure
    # Whoever has the key can tell which is which.
    namer = Namer(load_key(Path(str(path)) / "mirrors" / "policy.key"))
    for name in ("0", "1", "2"):
        assert namer.name("module", name) in sent
    # The numbers are those of the record.
    points = {(line[0], line[1]): float(line[3]) for line in lines if len(line) == 4}
    losses = {point[1]: value for point, value in points.items() if "name='loss'," in point[0]}
    recorded = data.scalars.to_pylist()
    assert losses == {str(row["step"]): row["value"] for row in recorded if row["name"] == "loss"}
    audit = read_audit(Path(str(path)))
    assert set(audit["channel"].to_pylist()) == {"metrics", "figures"}
    assert set(audit["destination"].to_pylist()) == {str(tmp_path / "mirror")}
    metrics = [row for row in audit.to_pylist() if row["channel"] == "metrics"]
    assert sum(row["rows"] for row in metrics) == len([line for line in lines if len(line) == 4])
    assert not any("secret" in name for row in metrics for name in row["fields"])
    assert len(set(audit["policy"].to_pylist())) == 1
    assert audit["policy"][0].as_py()


def test_what_cannot_be_written_down_does_not_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class InTheWay(JsonLines):
        """A file is where the audit should go, until it is taken away."""

        def open(self, run: RunInfo, destination: Destination, memory: MutableMapping[str, str]) -> None:
            super().open(run, destination, memory)
            shutil.rmtree(run.path / "mirrors" / "audit")
            (run.path / "mirrors" / "audit").write_text("")

    monkeypatch.chdir(tmp_path)
    model = Small()
    run = statsbridge.init(model, backend=InTheWay(tmp_path / "store"))
    model(torch.randn(4, 8)).sum().backward()
    run.step(loss=1.0)
    with pytest.warns(statsbridge.StatsBridgeWarning) as warned:
        run.finish(timeout=2)
    assert "cannot be written" in str(warned[0].message)
    assert "has not delivered" in str(warned[1].message)
    assert lines(tmp_path / "store") == []
    assert run.path is not None
    (run.path / "mirrors" / "audit").unlink()
    assert read_audit(run.path).num_rows == 0
