"""A local repository, with the real client; what it holds is read by Aim's own interface too."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import struct
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import aim
import numpy as np
import plotly.graph_objects as go
import psutil
import pytest
from aim_helpers import TIME, as_dict, points, read, run_info, send, statistic
from statsbridge_aim import Aim

from statsbridge.errors import ConfigError, MirrorError, Reject, Retry
from statsbridge.mirror import Batch, Event, Histogram, Point, RunInfo, Series
from statsbridge.moments import HISTOGRAM_BINS, ZERO_BIN, histogram_edges

QUIET = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}
VALUES = [0.1, float("nan"), float("inf"), float("-inf"), 1e300, 5e-324, -0.0, 0.0, 1 + 2**-52, -1.7976931348623157e308]
PRINTABLE = "".join(chr(code) for code in range(32, 127))
NAMES = [
    PRINTABLE,
    "é漢字😀ß",
    "x" * 400,
    "",
    "__log_records",
    "logs",
    "loss",
    "loss ",
    "Loss",
    "a.b",
    "a/b",
    "a_b",
    "a:b",
]


def bits(values: list[float]) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]


@dataclass
class Mirrored:
    """A run that has been mirrored, and all that was sent."""

    info: RunInfo
    folder: Path
    points: list[Point]
    adapter: Aim
    memory: dict[str, str] = field(default_factory=dict)

    @cached_property
    def found(self) -> dict[tuple[str, int], float]:
        """What `read_back` gives."""
        return read(self.adapter, self.info, self.memory)

    def run(self) -> Any:
        """The run, by Aim's own interface."""
        return aim.Repo(str(self.folder)).get_run(self.memory["run"])


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Mirrored:
    """One run with a bit of everything; made once, and already ended."""
    folder = tmp_path_factory.mktemp("everything")
    record = folder / "record"
    (record / "stats" / "rank=0").mkdir(parents=True)
    (record / "run.json").write_text("{}")
    (record / "stats" / "rank=0" / "0-9.parquet").write_bytes(b"part")
    config = {"lr": 1e-3, "layers": [1, 2], "": {"optimizer": object}, "seed": 2**64, "ends": [-(2**63), 2**63 - 1]}
    info = run_info(record, config=config, versions={"torch": "2"})
    sent = [Point(Series("values", "scalar"), step, TIME, value) for step, value in enumerate(VALUES)]
    sent += [Point(Series(name, "scalar"), 7, TIME, float(number)) for number, name in enumerate(NAMES)]
    sent += points([statistic(f"blocks.{number}.conv") for number in range(1000)], [10])
    sent += points([statistic(name) for name in NAMES], [20])
    adapter = Aim(folder, experiment="an experiment")
    kept = Mirrored(info, folder, sent, adapter)
    adapter.open(info, adapter.destination(), kept.memory)
    send(adapter, sent)
    unfit = Point(Series("\udcff", "scalar"), 7, TIME, 1.0)
    with pytest.raises(Reject, match="refuses 1 points") as refusal:
        send(adapter, [sent[0], unfit, sent[1]])
    assert refusal.value.points == [unfit]
    counts = np.zeros(HISTOGRAM_BINS, np.int64)
    counts[[ZERO_BIN, ZERO_BIN + 66]] = [5, 64]
    edges = np.concatenate(([-np.inf], histogram_edges(), [np.inf]))
    adapter.send(Batch(histograms=[Histogram(statistic("blocks.0.conv", "histogram"), 3, TIME, counts, edges)]))
    event = Event(11, 7, TIME, "nan_loss", "critical", "blocks.0", "activation", None, 1.0, 0.5, "the loss is NaN")
    for _ in range(2):
        adapter.alert(event)
        adapter.figure("depth", go.Figure(go.Heatmap(z=[[1, 2], [3, 4]])), 5)
    adapter.artifact(record)
    live = read(adapter, info, kept.memory)
    assert live.keys() == as_dict(sent).keys(), "a run that is still open is read whole"
    adapter.close("finished")
    return kept


def test_every_float64_comes_back_bit_by_bit(mirrored: Mirrored) -> None:
    found = mirrored.found
    key = mirrored.adapter.key(Series("values", "scalar"))
    assert bits([found[key, step] for step in range(len(VALUES))]) == bits(VALUES)
    assert [mirrored.adapter.stored(value) for value in VALUES[2:]] == VALUES[2:]
    metric = mirrored.run().get_metric("values", aim.storage.context.Context({}))
    steps, (values, *_) = metric.data.items_list()
    assert steps == list(range(len(VALUES)))
    assert bits(values) == bits(VALUES)


def test_all_points_arrive_once_under_names_of_their_own(mirrored: Mirrored) -> None:
    found = mirrored.found
    assert found.keys() == as_dict(mirrored.points).keys()
    finite = {place: value for place, value in as_dict(mirrored.points).items() if not math.isnan(value)}
    assert finite.items() <= found.items()


def test_aim_itself_finds_every_curve_without_being_told_to_index(mirrored: Mirrored) -> None:
    """The same curves by Aim's query, which sees only what has been indexed."""
    found = {}
    query = aim.Repo(str(mirrored.folder)).query_metrics("metric.context.site == 'activation'", report_mode=0)
    for metric in query.iter():
        steps, (values, *_) = metric.data.items_list()
        context = metric.context.to_dict()
        assert (metric.name, context["type"], context["depth"]) == ("activation/std", "Conv2d", 1)
        found[context["module"]] = list(zip(steps, values, strict=True))
    sent = {point.series.module: [(point.step, point.value)] for point in mirrored.points if point.series.module}
    sent[""] = [(point.step, point.value) for point in mirrored.points if point.series.module == ""]
    assert found == sent


def test_the_run_says_what_it_mirrors(mirrored: Mirrored) -> None:
    run = mirrored.run()
    assert (run.name, run.experiment, run.active) == ("a run", "an experiment", False)
    assert run["hparams"] == {
        "lr": 1e-3,
        "layers": [1, 2],
        "(empty)": {"optimizer": str(object)},
        "seed": str(2**64),  # which Aim's 64 bits do not hold
        "ends": [-(2**63), 2**63 - 1],
    }
    told = {"id": "run-1", "attempt": 0, "created": "2026-01-02T00:00:00+00:00", "versions": {"torch": "2"}}
    assert run["statsbridge"] == told | {"status": "finished"}


def test_a_histogram_keeps_its_counts(mirrored: Mirrored) -> None:
    context = {"module": "blocks.0.conv", "type": "Conv2d", "site": "activation", "depth": 1, "kind": "histogram"}
    found = mirrored.run().get_distribution_sequence("activation/histogram", aim.storage.context.Context(context))
    weights, edges = found.values[3].to_np_histogram()
    assert (edges[0], edges[-1]) == (0.0, 2.0)
    assert weights[0] == 5
    np.testing.assert_allclose(weights[64:], 1.0)


def test_an_alert_is_one_message_and_wakes_nobody(mirrored: Mirrored) -> None:
    ((place, (record, *_)),) = mirrored.run().get_log_records().data.items()
    assert place == 11
    assert (record.message, record.level) == ("the loss is NaN", logging.CRITICAL)
    told = record.json()
    assert told["timestamp"] == TIME / 1e6
    assert told["args"] == {"kind": "nan_loss", "step": 7, "module": "blocks.0", "site": "activation"}
    assert not list(mirrored.folder.rglob("*new_logs*")), "this file is what Aim's notifier looks for"


def test_a_figure_replaces_itself_at_its_step(mirrored: Mirrored) -> None:
    figures = mirrored.run().get_figure_sequence("depth", aim.storage.context.Context({"kind": "figure"}))
    ((step, shown),) = figures.values.items()
    assert step == 5
    np.testing.assert_array_equal(shown.to_plotly_figure().data[0].z, [[1, 2], [3, 4]])


def test_an_artifact_is_a_copy_of_the_folder(mirrored: Mirrored, tmp_path: Path) -> None:
    artifacts = mirrored.run().artifacts
    assert sorted(artifacts) == ["record/run.json", "record/stats/rank=0/0-9.parquet"]
    fetched = artifacts["record/stats/rank=0/0-9.parquet"].download(str(tmp_path))
    assert Path(fetched).read_bytes() == b"part"


def test_reading_back_changes_no_file(mirrored: Mirrored) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(path): path.stat()[6:9:2] for path in (mirrored.folder / ".aim").rglob("*")}

    before = state()
    assert read(mirrored.adapter, mirrored.info, mirrored.memory)
    assert state() == before


@pytest.mark.slow
def test_killed_processes_lose_nothing_and_the_next_goes_on(tmp_path: Path) -> None:
    """Training and worker die by kill -9 right after `send`; another takes the run up; its worker dies too."""
    curves = [statistic(f"m{number}") for number in range(20)]
    script = textwrap.dedent(
        """
        import json, os, signal, sys
        from pathlib import Path
        sys.path[:0] = json.loads(sys.argv[2])
        from aim_helpers import points, run_info, send, statistic
        from statsbridge_aim import Aim

        memory = {}
        adapter = Aim(sys.argv[1])
        adapter.open(run_info(Path(sys.argv[1])), adapter.destination(), memory)
        send(adapter, points([statistic(f"m{number}") for number in range(20)], range(10)))
        print(json.dumps(memory), flush=True)
        os.kill(adapter._worker._process.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), json.dumps(sys.path)],
        env=os.environ | {"__AIM_ENABLE_TRACKING_THREAD__": "1"},  # with which Aim itself answers before it stores
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    memory = json.loads(done.stdout)
    info = run_info(tmp_path)
    adapter = Aim(tmp_path)
    first = points(curves, range(10))
    assert read(adapter, info, memory) == as_dict(first)

    resumed = dict(memory)
    adapter.open(info, adapter.destination(), resumed)
    assert resumed == memory
    rest = points(curves, range(8, 20))
    send(adapter, rest)
    assert adapter._worker is not None
    adapter._worker._process.kill()
    with pytest.raises(Retry, match="ended with -9"):
        send(adapter, rest)
    send(adapter, rest)
    adapter.close("finished")
    assert read(adapter, info, memory) == as_dict(first + rest)
    assert len(list((tmp_path / ".aim" / "meta" / "chunks").iterdir())) == 1


@pytest.mark.slow
def test_the_worker_ends_the_run_when_its_parent_dies(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import json, os, signal, sys
        from pathlib import Path
        sys.path[:0] = json.loads(sys.argv[2])
        from aim_helpers import points, run_info, send, statistic
        from statsbridge_aim import Aim

        memory = {}
        adapter = Aim(sys.argv[1])
        adapter.open(run_info(Path(sys.argv[1])), adapter.destination(), memory)
        send(adapter, points([statistic("m")], range(10)))
        print(json.dumps([memory, adapter._worker._process.pid]), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), json.dumps(sys.path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    memory, worker = json.loads(done.stdout)
    for _ in range(300):
        if not psutil.pid_exists(worker):
            break
        time.sleep(0.1)
    assert not psutil.pid_exists(worker)
    assert not list((tmp_path / ".aim" / "locks").glob("*.softlock"))
    run = aim.Repo(str(tmp_path)).get_run(memory["run"])
    assert (run.active, run["statsbridge", "status"]) == (False, "stopped")


@pytest.mark.slow
def test_alongside_the_users_own_run(tmp_path: Path) -> None:
    """The user tracks in this process and repository, by steps and without, before, between and after us."""
    info = run_info(tmp_path)
    theirs = aim.Run(repo=str(tmp_path), experiment="theirs", **QUIET)
    theirs.track(1.0, name="loss")
    adapter, memory = Aim(tmp_path), {}
    adapter.open(info, adapter.destination(), memory)
    theirs.track(2.0, name="loss")
    curves = [Series("loss", "scalar"), statistic("a")]
    sent = points(curves, range(50))

    mirror = threading.Thread(target=send, args=(adapter, sent))
    mirror.start()
    for step in range(50):
        theirs.track(float(step), name="acc", step=step, context={"subset": "val"})
    mirror.join()
    theirs.track(3.0, name="loss")
    adapter.close("finished")
    theirs.track(4.0, name="loss")
    assert theirs.active
    theirs.close()

    assert read(adapter, info, memory) == as_dict(sent)
    own = read(adapter, info, {"run": theirs.hash})
    loss = {('["loss", {}]', step): float(step + 1) for step in range(4)}
    assert own == loss | {('["acc", {"subset": "val"}]', step): float(step) for step in range(50)}


@pytest.mark.slow
def test_many_make_the_repository_at_once(tmp_path: Path) -> None:
    """Two mirrors and the user's own run meet in a folder that has no repository yet."""
    errors: list[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:  # a thread's error must reach the test
            errors.append(error)

    def mirror(name: str) -> None:
        adapter, info, memory = Aim(tmp_path), run_info(tmp_path, id=name), {}
        sent = points([statistic(name)], range(5))
        for _ in range(20):
            with contextlib.suppress(Retry):  # while the user's run makes it
                adapter.open(info, adapter.destination(), memory)
                break
        send(adapter, sent)
        adapter.close("finished")
        assert read(adapter, info, memory) == as_dict(sent)

    def user() -> None:
        run = aim.Run(repo=str(tmp_path), **QUIET)
        run.track(1.0, name="loss", step=0)
        run.close()

    threads = [
        threading.Thread(target=guarded, args=(work,)) for work in (lambda: mirror("a"), user, lambda: mirror("b"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(list((tmp_path / ".aim" / "meta" / "chunks").iterdir())) == 3
    assert [path.name for path in tmp_path.iterdir()] == [".aim"]


def test_a_run_that_is_gone_or_was_never_there(mirrored: Mirrored, tmp_path: Path) -> None:
    adapter = Aim(mirrored.folder)
    with pytest.raises(MirrorError, match="Cannot find Run 0123"):
        adapter.open(mirrored.info, adapter.destination(), {"run": "0123"})
    with pytest.raises(MirrorError, match="no run 0123"):
        read(adapter, mirrored.info, {"run": "0123"})
    with pytest.raises(MirrorError, match="not begun"):
        read(adapter, mirrored.info, {})
    with pytest.raises(MirrorError, match="no Aim repository"):
        read(Aim(tmp_path), mirrored.info, {"run": "0123"})
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(MirrorError, match="file") as told:
        Aim(tmp_path / "file").open(mirrored.info, Aim(tmp_path / "file").destination(), {})
    assert not isinstance(told.value, Retry)


@pytest.mark.slow
def test_damage_is_an_error_and_not_silence(mirrored: Mirrored, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(mirrored.folder), str(copy)], check=True)
    for path in (copy / ".aim" / "seqs" / "chunks" / mirrored.memory["run"]).glob("*.sst"):
        content = bytearray(path.read_bytes())
        content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
        path.write_bytes(content)
    with pytest.raises(MirrorError, match=r"damaged|[Cc]orrupt"):
        read(Aim(copy), mirrored.info, mirrored.memory)


def test_wrong_arguments() -> None:
    for target in ("ssh://host/repo", "http://host:1", "aim://user:secret@host:1"):
        with pytest.raises(ConfigError) as told:
            Aim(target)
        assert "secret" not in str(told.value)
    with pytest.raises(ConfigError, match="artifacts"):
        Aim(artifacts="/tmp/x")
    with pytest.raises(ConfigError, match="timeout"):
        Aim(timeout=0)


def test_a_server_keeps_no_files_unless_told_where() -> None:
    adapter = Aim("aim://127.0.0.1:1")
    with pytest.raises(Retry, match="Failed to connect"):
        adapter.open(run_info(Path("/")), adapter.destination(), {})
    with pytest.raises(Reject, match="s3://"):
        adapter.artifact(Path("/"))


def test_destination_is_where_aim_itself_would_go_and_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert Aim().destination().address == aim.Repo.default_repo_path() == str(inner)
    (tmp_path / ".aim").mkdir()
    assert Aim().destination().address == aim.Repo.default_repo_path() == str(tmp_path)
    assert not Aim().destination().explicit
    for given in (tmp_path, f"{tmp_path}/", f"{tmp_path}/.aim", "../..", "~", "my.aim", f"{tmp_path}/my.aim"):
        destination = Aim(given).destination()
        assert destination.address == aim.sdk.utils.clean_repo_path(str(given)).rstrip("/")
        assert destination.explicit
    assert Aim("aim://host:53800/").destination().address == "aim://host:53800"
    assert Aim(**Aim(tmp_path, experiment="e").options()).options() == Aim(tmp_path, experiment="e").options()
    code = "import sys; from statsbridge_aim import Aim; Aim('x').destination(); assert 'aim' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_without_aim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "aim", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MirrorError, match=r"statsbridge\[aim\]"):
        Aim(tmp_path).open(run_info(tmp_path), Aim(tmp_path).destination(), {})
    assert not os.listdir(tmp_path)
