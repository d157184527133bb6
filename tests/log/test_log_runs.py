"""Run folders: identity, what a list of them says, and which run a word means."""

import errno
import json
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from log_rows import new_run, scalar_rows, start_program, stats_rows, write_run

from statsbridge import ConfigError, LogError, __version__
from statsbridge.analyze.listing import matching
from statsbridge.log import Writer, create_run, list_runs, load, resolve_run
from statsbridge.log.compaction import compact_table
from statsbridge.log.folder import new_run_id, writer_file
from statsbridge.log.runs import read_info, runs_in, summaries_in


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_run_json_says_who_and_with_what(tmp_path: Path) -> None:
    config = {
        "rate": 0.1,
        "layers": (1, 2),
        "nested": {3: {"deep": None}},
        "path": Path("/data"),
        "nan": float("nan"),
        "odd": Odd(),
        "name": "ünï\udc80",
    }
    config["self"] = config
    before = datetime.now(UTC)
    run = create_run(
        tmp_path / "new" / "folder",
        name="first",
        config=config,
        information={"versions": {"torch": "2.9"}, "restricted": True, "every": 10, "id": "not this"},
    )
    info = json.loads((run / "run.json").read_text())
    assert run.is_absolute()
    assert info["id"] == run.name
    assert (info["name"], info["restricted"], info["every"], info["schema_version"]) == ("first", True, 10, 2)
    assert before <= datetime.fromisoformat(info["created"]) <= datetime.now(UTC)
    assert info["versions"]["torch"] == "2.9"
    assert info["versions"]["statsbridge"] == __version__
    assert {"python", "numpy", "pyarrow"} < set(info["versions"])
    assert info["config"]["rate"] == 0.1
    assert info["config"]["layers"] == [1, 2]
    assert info["config"]["nested"] == {"3": {"deep": None}}
    assert info["config"]["path"] == "PosixPath('/data')"
    assert (info["config"]["nan"], info["config"]["odd"]) == ("nan", "<Odd>")
    assert info["config"]["name"] == "ünï\udc80"


def test_a_run_without_a_name_is_called_by_its_id_and_is_not_restricted(tmp_path: Path) -> None:
    info = json.loads((new_run(tmp_path) / "run.json").read_text())
    assert info["name"] == info["id"]
    assert (info["config"], info["restricted"]) == ({}, False)


def test_nothing_private_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    run = new_run(tmp_path)
    write_run(run, {"scalars": scalar_rows(0, a=1)})
    for file in run.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            for private in (b"hunter2", b"SECRET_TOKEN", b"pytest", str(Path.home()).encode() + b"/"):
                assert private not in content, file


def test_files_have_the_users_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run = new_run(tmp_path / "runs")
        write_run(run, {"scalars": scalar_rows(0, a=1)})
    finally:
        os.umask(before)
    for path in (run.parent, *run.parent.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path


@pytest.mark.slow
def test_a_thousand_runs_are_unique_and_sort_by_time(tmp_path: Path) -> None:
    ids = [new_run(tmp_path).name for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert ids == sorted(ids)
    assert all(re.fullmatch(r"[0-9a-f-]+", run_id) for run_id in ids)


def test_ids_of_one_microsecond_are_unique_and_sort_before_the_next() -> None:
    moment = datetime.now(UTC)
    same = {new_run_id(moment) for _ in range(1000)}
    assert len(same) == 1000
    assert max(same) < new_run_id(moment + timedelta(microseconds=1))


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        new_run(tmp_path / "file" / "runs")
    assert str(tmp_path / "file" / "runs") in str(caught.value)
    assert "dir=" in str(caught.value)


def test_the_list_says_state_steps_rows_and_bytes(tmp_path: Path) -> None:
    first = new_run(tmp_path, name="first")
    steps = [{"scalars": scalar_rows(step, loss=1, rate=2)} for step in range(6)]
    sampled = [{"stats": stats_rows(step, 7), "scalars": scalar_rows(step, grad_norm=1)} for step in (0, 3)]
    write_run(first, *steps, *sampled)
    write_run(first, *sampled, rank=1)
    second = new_run(tmp_path, name="second")
    third = new_run(tmp_path, name="third")
    writer = Writer(third)
    (tmp_path / "no run").mkdir()
    broken = new_run(tmp_path)
    (broken / "run.json").write_text("{}")

    found = list_runs(tmp_path)
    writer.close()
    assert [run.path for run in found] == [first, second, third]
    assert [run.state for run in found] == ["finished", "created", "running"]
    summary = found[0]
    assert (summary.id, summary.name) == (first.name, "first")
    assert (summary.steps, summary.sampled_steps) == (6, 2)
    assert summary.rows == {"modules": 0, "stats": 28, "scalars": 16, "events": 0}
    assert summary.bytes == sum(file.stat().st_size for file in first.rglob("*.parquet"))
    assert summary.created == datetime.fromisoformat(json.loads((first / "run.json").read_text())["created"])
    assert (found[1].steps, found[1].bytes) == (0, 0)
    assert list_runs(tmp_path / "nowhere") == []


def loop(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(file.name)


@pytest.mark.parametrize("table", ["stats", "scalars"])
def test_a_run_that_the_disk_withholds_hides_no_other(table: str, tmp_path: Path) -> None:
    before, odd, after = (new_run(tmp_path, name=name) for name in ("before", "odd", "after"))
    loop(odd / table / "rank=0")
    assert [run.path for run in list_runs(tmp_path)] == [before, after]
    found, [problem] = summaries_in(tmp_path)
    assert [run.path for run in found] == [before, after]
    assert str(odd) in str(problem)
    assert "symbolic links" in str(problem)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ELOOP])
def test_a_folder_that_the_disk_withholds_hides_no_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, odd = new_run(tmp_path, name="good"), new_run(tmp_path, name="odd")
    asked = os.stat

    def stat(path: str | Path, *arguments: object, **keywords: object) -> os.stat_result:
        if str(odd) in os.fspath(path):
            raise OSError(number, os.strerror(number), os.fspath(path))
        return asked(path, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", stat)
    # Whose rights are missing is somebody else's folder, or none of ours: no run, as far as one can tell.
    withheld = number != errno.EACCES
    assert [run.path for run in list_runs(tmp_path) if run.path != odd] == [good]
    assert runs_in(tmp_path) == ([good, odd] if withheld else [good])


@pytest.mark.parametrize(
    "content",
    [
        '{"schema_version": 1e400, "created": "2026-01-01T00:00:00+00:00", "id": "x", "name": "x"}',
        '{"schema_version": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"schema_version": 1, "config": ' + '{"a": ' * 100_000 + "1" + "}" * 100_001,
    ],
)
def test_a_run_json_beyond_all_bounds_is_that_runs_error(content: str, tmp_path: Path) -> None:
    good, odd = new_run(tmp_path, name="good"), new_run(tmp_path, name="odd")
    (odd / "run.json").write_text(content)
    with pytest.raises(LogError, match=r"run\.json cannot be read: "):
        read_info(odd)
    assert [run.path for run in list_runs(tmp_path)] == [good]
    assert resolve_run("good", tmp_path) == good
    with pytest.raises(LogError, match=r"run\.json cannot be read: "):
        load(odd)


def test_states_that_only_a_reader_can_see(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    program = start_program("import os; Writer(Path(sys.argv[1])); os._exit(0)", run)
    program.communicate(timeout=60)
    assert list_runs(tmp_path)[0].state == "crashed"

    file = writer_file(run, 0)
    writer = json.loads(file.read_text())
    now = datetime.now(UTC)
    for changes, state in [
        ({"pid": os.getpid()}, "running"),
        ({"pid": os.getpid(), "heartbeat": (now - timedelta(hours=1)).isoformat()}, "crashed"),
        ({"host": "elsewhere"}, "running"),
        ({"host": "elsewhere", "heartbeat": (now - timedelta(hours=1)).isoformat()}, "crashed"),
        ({"state": "stopped"}, "stopped"),
        ({"state": "finished", "heartbeat": (now - timedelta(hours=1)).isoformat()}, "finished"),
    ]:
        file.write_text(json.dumps({**writer, **changes}))
        assert list_runs(tmp_path)[0].state == state, changes
    write_run(run, {"scalars": scalar_rows(0, a=1)}, rank=1)
    file.write_text(json.dumps(writer))
    assert list_runs(tmp_path)[0].state == "crashed", "one rank of two"
    file.write_text("{")
    assert list_runs(tmp_path)[0].state == "crashed"


def test_a_run_is_found_by_path_id_beginning_name_and_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [new_run(tmp_path, name) for name in ("one", "two", "two")]
    first = runs[0]
    shared = next(
        at for at, letters in enumerate(zip(*(run.name for run in runs), strict=True)) if len(set(letters)) > 1
    )
    beginning = first.name[:-4]
    for text in (first, str(first), first.name, beginning, "one"):
        assert resolve_run(text, tmp_path) == first, text
    assert resolve_run("latest", tmp_path) == runs[2]
    monkeypatch.chdir(tmp_path)
    assert resolve_run(Path(first.name)) == first

    for text in ("two", first.name[:shared]):
        with pytest.raises(LogError, match=r"fits [23] runs") as caught:
            resolve_run(text, tmp_path)
        assert all(run.name in str(caught.value) for run in runs[1:])
    for text in ("three", "", first / "stats"):
        with pytest.raises(LogError) as caught:
            resolve_run(text, tmp_path)
        assert all(f"{run.name} (" in str(caught.value) for run in runs)
        assert "\n" not in str(caught.value)
    with pytest.raises(LogError, match="there are no runs in"):
        resolve_run("latest", tmp_path / "empty")


def test_a_long_list_of_choices_is_cut(tmp_path: Path) -> None:
    for number in range(25):
        new_run(tmp_path, f"n{number}")
    with pytest.raises(LogError, match=r"; there are: .*\(n24\), .*\(n20\) and 20 older$") as caught:
        resolve_run("nothing", tmp_path)
    assert len(str(caught.value)) < 250 + len(str(tmp_path))
    with pytest.raises(LogError, match=r"; did you mean 'n17'\? There are: "):
        resolve_run("nn17", tmp_path)


def test_a_folder_whose_name_is_no_utf8(tmp_path: Path) -> None:
    """Arrow takes paths for UTF-8; the system takes any bytes."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system wants UTF-8")
    run = new_run(folder)
    write_run(run, *({"stats": stats_rows(step, 2), "scalars": scalar_rows(step, loss=1)} for step in range(3)))
    [summary] = list_runs(folder)
    assert (summary.steps, summary.sampled_steps) == (3, 3)
    assert [one.id for one in matching([summary], "steps = 3 AND contains(path, 'caf')")] == [run.name]
    assert compact_table(run, "stats", 0, fan_in=2).parts_after == 1
    assert load(run).stats.num_rows == 6
