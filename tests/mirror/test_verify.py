"""What `verify` finds in a store that somebody changed, and that it finds nothing in one that nobody did."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mirror_helpers import JsonLines, lines
from typer.testing import CliRunner
from verify_helpers import STEPS, deliver, install, recorded

from statsbridge import ConfigError, LogError, Retry
from statsbridge.cli import app
from statsbridge.log import load
from statsbridge.mirror.comparison import Expected, Found, compare_step
from statsbridge.mirror.state import load_states, state_file
from statsbridge.mirror.tail import Cursor
from statsbridge.mirror.verify import Verification, verify

Line = list[Any]


@pytest.fixture(autouse=True)
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path / "installed")))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return recorded(tmp_path / "statsbridge-runs")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store.jsonl"


def mirrored(
    run: Path, store: Path, backend: str = "lines", change: Callable[[list[Line]], None] | None = None
) -> Verification:
    """Deliver the run, let somebody change the store, and verify it."""
    deliver(run, f"{backend}:{store}")
    if change is not None:
        edit(store, change)
    (result,) = verify(run, backend)
    return result


def edit(store: Path, change: Callable[[list[Line]], None]) -> None:
    there = [list(line) for line in lines(store)]
    change(there)
    store.write_text("".join(json.dumps(line) + "\n" for line in there))


def differences(result: Verification) -> list[tuple[str, str | None, int | None]]:
    return [(row["kind"], row["key"], row["step"]) for row in result.differences.to_pylist()]


def test_an_untouched_store_is_proved_value_by_value(run: Path, store: Path) -> None:
    result = mirrored(run, store)
    assert (result.proved, result.counts, result.backend) == (True, {}, "lines")
    assert result.compared == result.same == len(lines(store))
    assert result.address == str(store)
    names = {name for name, *_ in lines(store)}
    assert {"loss", "loss/smoothed", "val", "activation/std/m0", "by_type/activation/std/Linear"} <= names


def test_a_changed_value_is_found_to_the_last_bit(run: Path, store: Path) -> None:
    def change(there: list[Line]) -> None:
        (line,) = (line for line in there if line[:2] == ["loss", 1])
        line[3] = repr(math.nextafter(1 / 3, 1))

    result = mirrored(run, store, change=change)
    (row,) = result.differences.to_pylist()
    assert (row["kind"], row["key"], row["step"]) == ("different", "loss", 1)
    assert (row["recorded"], row["found"]) == (1 / 3, math.nextafter(1 / 3, 1))
    assert row["reason"] == "another value"
    assert not result.proved
    assert result.same == result.compared - 1


@pytest.mark.parametrize(("step", "instead"), [(5, "0.0"), (2, "0.0"), (3, "nan"), (4, "inf")])
def test_special_values_have_no_doubles(run: Path, store: Path, step: int, instead: str) -> None:
    def change(there: list[Line]) -> None:
        (line,) = (line for line in there if line[:2] == ["loss", step])
        line[3] = instead

    assert differences(mirrored(run, store, change=change)) == [("different", "loss", step)]


def test_a_deleted_value_and_a_deleted_curve_are_found(run: Path, store: Path) -> None:
    def change(there: list[Line]) -> None:
        there[:] = [line for line in there if line[0] != "lr" and line[:2] != ["activation/mean/m1", 3]]

    found = differences(mirrored(run, store, change=change))
    assert found == [("missing", "activation/mean/m1", 3), *(("missing", "lr", step) for step in range(STEPS))]


def test_a_duplicate_and_a_stranger_are_found(run: Path, store: Path) -> None:
    def change(there: list[Line]) -> None:
        there.append(next(line for line in there if line[:2] == ["loss", 2]))
        there.append(["loss", 77, 0, "1.0"])
        there.append(["accuracy", 0, 0, "1.0"])

    found = differences(mirrored(run, store, change=change))
    assert found == [("extra", "accuracy", 0), ("duplicated", "loss", 2), ("extra", "loss", 77)]


def test_another_time_is_found_and_rounding_to_milliseconds_is_not(run: Path, store: Path) -> None:
    def change(there: list[Line]) -> None:
        for line in there:
            line[2] = line[2] // 1000 * 1000
            if line[3] == "99.0" or line[:2] == ["loss", 0]:
                line[2] += 5000

    rows = mirrored(run, store, change=change).differences.to_pylist()
    assert [(row["kind"], row["key"], row["reason"]) for row in rows] == [
        ("different", "loss", "another time"),
        ("different", "val", "another time"),
    ]


def test_what_is_refused_altered_or_superseded_is_documented(run: Path, tmp_path: Path) -> None:
    refused = mirrored(run, tmp_path / "refusing", "refusing")
    assert refused.proved
    (row,) = refused.differences.to_pylist()
    assert (row["kind"], row["key"], row["step"], row["reason"]) == ("rejected", "loss", 2, "no NaN here")
    last = mirrored(run, tmp_path / "last", "last")
    assert last.proved
    (row,) = last.differences.to_pylist()
    assert (row["kind"], row["key"], row["step"], row["recorded"]) == ("superseded", "val", 1, 98.0)
    single = mirrored(run, tmp_path / "single", "single")
    assert single.proved
    assert set(single.counts) == {"altered"}
    altered = {row["step"]: row["found"] for row in single.differences.to_pylist() if row["key"] == "loss"}
    assert altered == {1: 0.3333333432674408, 4: math.inf}


def test_an_altered_value_must_be_what_the_adapter_documents(run: Path, store: Path) -> None:
    def change(there: list[Line]) -> None:
        (line,) = (line for line in there if line[:2] == ["loss", 4])
        line[3] = "-inf"

    result = mirrored(run, store, "single", change)
    assert [row["key"] for row in result.differences.to_pylist() if row["kind"] == "different"] == ["loss"]


def test_a_store_that_is_torn_is_named_and_its_rest_compared(run: Path, store: Path) -> None:
    deliver(run, f"torn:{store}")
    text = store.read_text()
    store.write_text(text[: len(text) - 15])
    (result,) = verify(run, "torn")
    rows = result.differences.to_pylist()
    assert not result.proved
    (unreadable,) = (row for row in rows if row["kind"] == "unreadable")
    assert f"line {len(text.splitlines())}: cut short" in unreadable["reason"]
    assert result.counts["missing"] == 1
    store.write_text("")
    edit(store, lambda there: there.append("{"))
    (result,) = verify(run, "torn")
    assert (result.counts, result.same) == ({"unreadable": 1}, 0)


def test_a_store_that_is_down_is_no_finding(run: Path, store: Path) -> None:
    deliver(run, f"down:{store}")
    with pytest.raises(Retry, match="connection refused"):
        verify(run, "down")


def test_what_waits_to_be_sent_is_told_from_what_is_missing(run: Path, store: Path) -> None:
    deliver(run, f"lines:{store}")
    (state,) = load_states(run)
    ended = state.cursor
    replace(state, cursor=Cursor()).save(run)
    (result,) = verify(run, "lines")
    assert (result.proved, result.counts) == (True, {})
    edit(store, lambda there: there.clear())
    (result,) = verify(run, "lines")
    assert result.proved
    assert result.counts == {"not_yet_sent": result.compared}
    replace(state, cursor=ended).save(run)
    (result,) = verify(run, "lines")
    assert result.counts == {"missing": result.compared}


def test_the_policy_decides_what_should_be_there(
    run: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(
        'applies_to = "all"\nnames = "hashed"\nstatistics = ["std"]\n'
        f'[[destinations]]\nbackend = "lines"\npath = "{store}"\n'
    )
    monkeypatch.setenv("STATSBRIDGE_POLICY", str(policy))
    result = mirrored(run, store)
    assert (result.proved, result.counts) == (True, {})
    assert result.same > 0
    assert not any("m0" in name for name, *_ in lines(store))


def test_a_damaged_record_proves_nothing(run: Path, store: Path) -> None:
    deliver(run, f"lines:{store}")
    part = sorted((run / "scalars" / "rank=0").iterdir())[1]
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    (result,) = verify(run, "lines")
    assert not result.proved
    assert result.counts["unreadable"] == 1
    assert any(part.name in row["reason"] for row in result.differences.to_pylist() if row["kind"] == "unreadable")


def test_a_mirror_that_is_not_there(run: Path, store: Path) -> None:
    with pytest.raises(ConfigError, match="has no mirror at lines; it has none"):
        verify(run, "lines")
    deliver(run, f"lines:{store}")
    with pytest.raises(ConfigError, match=f"has no mirror at mlflow; it has lines \\({store}"):
        verify(run, "mlflow")
    with pytest.raises(ConfigError, match="no mirror at lines:elsewhere"):
        verify(run, "lines:elsewhere")
    with pytest.raises(ConfigError, match="the record itself"):
        verify(run, "local")
    assert len(verify(run, f"lines:{store}")) == 1


def test_several_mirrors_of_one_backend(run: Path, tmp_path: Path) -> None:
    deliver(run, f"lines:{tmp_path / 'a'}")
    deliver(run, f"lines:{tmp_path / 'b'}")
    edit(tmp_path / "b", lambda there: there.clear())
    assert [result.proved for result in sorted(verify(run, "lines"), key=lambda one: one.address)] == [True, False]


def test_a_damaged_mirror_is_named_and_the_others_are_compared(run: Path, tmp_path: Path) -> None:
    deliver(run, f"lines:{tmp_path / 'a'}")
    (whole,) = verify(run, "lines")
    broken = state_file(run, load_states(run)[0].name)
    deliver(run, f"lines:{tmp_path / 'b'}")
    broken.write_text("{")
    good, lost = verify(run, "lines")
    assert (good.address, good.proved, good.same) == (str(tmp_path / "b"), True, whole.same)
    assert (lost.compared, lost.proved, lost.counts) == (0, False, {"unreadable": 1})
    (row,) = lost.differences.to_pylist()
    assert str(broken) in row["reason"]
    # Of the one that is asked for alone the others' files do not matter; of the damaged one nothing can be said.
    assert [one.proved for one in verify(run, f"lines:{tmp_path / 'b'}")] == [True]
    with pytest.raises(LogError, match="cannot be read"):
        verify(run, f"lines:{tmp_path / 'a'}")
    with pytest.raises(ConfigError, match=f"has no mirror at torn; it has lines .*; .*{broken.name} cannot be read"):
        verify(run, "torn")
    result = CliRunner().invoke(app, ["verify", str(run), "--against", "lines"])
    assert result.exit_code == 1
    assert str(broken) in result.stdout


def test_a_store_that_is_down_does_not_bar_another(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        deliver(run, f"lines:{tmp_path / name}")
    read_back = JsonLines.read_back

    def one_is_down(self: JsonLines, *arguments: Any) -> Any:
        if self.path.name == "a":
            raise Retry("connection refused")
        return read_back(self, *arguments)

    monkeypatch.setattr(JsonLines, "read_back", one_is_down)
    results = {Path(one.address).name: one for one in verify(run, "lines")}
    assert (results["a"].counts, results["b"].proved) == ({"unreadable": 1}, True)


def test_damaged_dead_letters_are_named_and_the_rest_is_compared(run: Path, tmp_path: Path) -> None:
    before = mirrored(run, tmp_path / "store", "refusing")
    assert before.counts["rejected"] >= 1
    (file,) = (run / "mirrors").glob("*/dead-letters/*.parquet")
    file.write_bytes(file.read_bytes()[:40])
    (result,) = verify(run, "refusing")
    assert not result.proved
    assert (result.compared, result.counts["unreadable"]) == (before.compared, 1)
    (reason,) = (row["reason"] for row in result.differences.to_pylist() if row["kind"] == "unreadable")
    assert str(file) in reason


# ---- one step of one curve ---------------------------------------------------------------------------------


def value(number: float, time: int = 0, *, sent: bool = True, refused: str | None = None) -> Expected:
    return Expected("loss", time, number, number, sent, refused)


def kinds(expected: list[Expected], found: list[Found], *, keeps_all: bool = True) -> list[str]:
    return sorted(row["kind"] for row in compare_step("k", 0, expected, found, keeps_all=keeps_all))


def test_of_several_values_a_tracker_may_keep_the_last() -> None:
    three = [value(1.0), value(2.0, 5000), value(3.0, 9000)]
    assert kinds(three, [Found(9000, 3.0)], keeps_all=False) == ["superseded", "superseded"]
    assert kinds(three, [Found(9000, 3.0)]) == ["missing", "missing"]
    assert kinds(three, [Found(0, 1.0)], keeps_all=False) == ["missing", "superseded"]
    assert kinds([value(1.0), value(2.0, refused="late")], [Found(0, 1.0)], keeps_all=False) == ["rejected"]
    assert kinds([value(1.0), value(2.0, sent=False)], [Found(0, 1.0)], keeps_all=False) == ["not_yet_sent"]
    assert kinds([value(1.0), value(2.0, sent=False)], [Found(0, 2.0)], keeps_all=False) == ["superseded"]


def test_equal_values_of_one_moment_may_be_kept_once() -> None:
    assert kinds([value(1.0), value(1.0, 300)], [Found(0, 1.0)]) == ["superseded"]
    assert kinds([value(1.0), value(1.0, 3000)], [Found(0, 1.0)]) == ["missing"]
    assert kinds([value(1.0), value(1.0, 3000)], [Found(0, 1.0), Found(9000, 1.0)]) == ["different"]
    assert kinds([value(1.0)], [Found(0, 1.0), Found(9000, 1.0)]) == ["duplicated"]


numbers = st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf])


@given(st.lists(st.tuples(numbers, st.integers(0, 3)), max_size=5), st.data())
def test_each_change_of_a_multiset_is_counted(pairs: list[tuple[float, int]], data: st.DataObject) -> None:
    pairs = list({(repr(number), time): (number, time) for number, time in pairs}.values())
    expected = [value(number, 10_000 * time) for number, time in pairs]
    found = [Found(10_000 * time, number) for number, time in pairs]
    shuffled = data.draw(st.permutations(found))
    assert kinds(expected, shuffled) == []
    lost = data.draw(st.integers(0, len(found)))
    assert kinds(expected, shuffled[lost:]) == ["missing"] * lost
    assert kinds(expected, [*shuffled, *shuffled[:lost]]) == ["duplicated"] * lost
    assert kinds(expected, [*shuffled, Found(0, 7.0)]) == ["extra"]


# ---- the command -------------------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["verify", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_says_that_all_is_proved(run: Path, store: Path) -> None:
    deliver(run, f"lines:{store}")
    status, text, _ = command("latest", "--against", "lines")
    assert status == 0
    total = len(lines(store))
    assert text.splitlines() == [
        f"lines ({store}): {total} of {total} values are the same",
        "what was recorded is what the tracker has",
    ]


def test_the_command_does_not_say_that_what_was_not_sent_is_there(run: Path, store: Path) -> None:
    deliver(run, f"lines:{store}")
    (state,) = load_states(run)
    replace(state, cursor=Cursor()).save(run)
    store.write_text("")
    status, text, _ = command("latest", "--against", "lines")
    assert status == 0
    assert text.splitlines()[-1] == "what was sent is what the tracker has; statsbridge sync delivers the rest"


def test_the_command_says_what_differs_in_every_format(run: Path, store: Path) -> None:
    deliver(run, f"lines:{store}")
    edit(store, lambda there: there.remove(next(line for line in there if line[:2] == ["loss", 4])))
    status, text, _ = command(str(run), "--against", f"lines:{store}")
    assert status == 1
    assert "missing: 1" in text
    assert "1e+300" in text
    status, text, _ = command(str(run), "--against", "lines", "--format", "json")
    (document,) = json.loads(text)
    assert status == 1
    assert document["counts"] == {"missing": 1}
    assert document["proved"] is False
    (row,) = document["differences"]
    assert (row["key"], row["step"], row["recorded"], row["recorded_time"]) == (
        "loss", 4, 1e300, "2023-11-14T22:13:24+00:00",
    )  # fmt: skip
    status, text, _ = command(str(run), "--against", "lines", "--format", "csv")
    assert status == 1
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["backend"], row["kind"], float(row["recorded"]), row["found"]) == ("lines", "missing", 1e300, "")


def test_a_store_that_cannot_be_reached_is_status_2(run: Path, store: Path) -> None:
    deliver(run, f"down:{store}")
    assert command(str(run), "--against", "down") == (2, "", "statsbridge: connection refused\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either --against BACKEND or --scalars FILE"),
        (("--against", "lines", "--scalars", "x.csv"), "either --against BACKEND or --scalars FILE"),
        (("--against", "lines", "--tolerance", "0.1"), "--tolerance belongs to --scalars"),
        (("--against", "lines", "--format", "xml"), "unknown format xml"),
        (("--against", "linse"), "no mirror at linse"),
    ],
)
def test_wrong_arguments_of_the_command(run: Path, arguments: tuple[str, ...], message: str) -> None:
    status, _, error = command(str(run), *arguments)
    assert status == 2
    assert message in error


def test_the_store_is_not_changed(run: Path, store: Path) -> None:
    deliver(run, f"lines:{store}")
    before = {file: file.read_bytes() for file in [*run.rglob("*"), store] if file.is_file()}
    verify(run, "lines")
    assert {file: file.read_bytes() for file in [*run.rglob("*"), store] if file.is_file()} == before
    assert load(run).damaged == ()
