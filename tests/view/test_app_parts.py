"""The parts of the live page that need no browser: its address, its tree, its choices, and what it keeps."""

import threading
import time
from pathlib import Path

import pytest
from app_helpers import MARKUP, record
from hypothesis import given
from hypothesis import strategies as st
from log_rows import new_run, scalar_rows, stats_rows

from statsbridge import LogError, load
from statsbridge.analyze.diagnosis import diagnose
from statsbridge.log import Writer
from statsbridge.view.app import diagnoses
from statsbridge.view.app.diagnoses import from_events
from statsbridge.view.app.facts import Facts, ModuleFacts, StepsOfParts, statistics_of
from statsbridge.view.app.judging import judge
from statsbridge.view.app.library import Library, Recent
from statsbridge.view.app.state import TABS, State, parse
from statsbridge.view.app.tree import grow

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


@given(
    st.builds(
        State,
        run=TEXT,
        tab=st.sampled_from([name for name, _ in TABS]),
        module=st.none() | TEXT,
        site=TEXT,
        statistic=TEXT,
        series=TEXT,
        call=st.integers(0, 99),
        step=st.none() | st.integers(-5, 10**12),
        smoothing=st.floats(0, 0.99),
        modules=TEXT,
        by=st.sampled_from(["depth", "type"]),
        kind=st.sampled_from(["heat", "ridge"]),
        names=st.lists(TEXT, max_size=3, unique=True).map(tuple),
        runs=st.lists(TEXT, max_size=3, unique=True).map(tuple),
        severity=st.sampled_from(["all", "warning", "critical"]),
    )
)
def test_every_place_has_an_address_that_leads_back(state: State) -> None:
    assert parse(state.address()) == (state, [])


def test_what_an_address_does_not_say_is_as_by_default() -> None:
    assert parse("") == (State(), [])
    assert State().address() == "?"
    assert State(run="r", module="").address() == "?run=r&module="


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("?step=1.5", "step '1.5'"),
        ("?call=x", "call 'x'"),
        ("?smoothing=nan", "smoothing 'nan'"),
        ("?kind=x", "kind 'x'"),
    ],
)
def test_what_is_not_understood_is_said_and_left_out(query: str, said: str) -> None:
    state, problems = parse(query)
    assert state == State()
    assert len(problems) == 1
    assert said in problems[0]


def modules(*paths: str) -> dict[str, ModuleFacts]:
    """Modules whose depth and order are their place in `paths`."""
    return {path: ModuleFacts(path, "Linear", "", place, place, 1) for place, path in enumerate(paths)}


def shape(nodes: list[dict]) -> list:
    return [(node["value"], shape(node["children"])) if "children" in node else node["value"] for node in nodes]


DEEP = modules("z", "a.10.x", "a.9.x", "a.9", "a.10", "a", "")


def test_the_tree_by_data_flow_puts_a_container_where_the_data_meets_it_first() -> None:
    tree = grow(DEEP, order="depth", search="", marks={}, shown=None)
    assert shape(tree.nodes) == [(".", [".z", (".a", [(".a.10", [".a.10.x"]), (".a.9", [".a.9.x"])])])]


def test_the_tree_by_name_counts_numbers_as_numbers() -> None:
    tree = grow(DEEP, order="name", search="", marks={}, shown=None)
    assert shape(tree.nodes) == [(".", [(".a", [(".a.9", [".a.9.x"]), (".a.10", [".a.10.x"])]), ".z"])]


@pytest.mark.parametrize("search", ["9.x", "A.9.X", "*9.x", "a.?.x"])
def test_a_search_keeps_the_way_to_what_it_finds(search: str) -> None:
    tree = grow(DEEP, order="depth", search=search, marks={}, shown=None)
    assert tree.matching == ["a.9.x"]
    assert shape(tree.nodes) == [(".", [(".a", [(".a.9", [".a.9.x"])])])]


def test_several_models_have_no_common_root() -> None:
    tree = grow(modules("g.a", "g", "d.a", "d"), order="depth", search="", marks={}, shown=None)
    assert shape(tree.nodes) == [(".g", [".g.a"]), (".d", [".d.a"])]


def test_a_large_tree_is_open_where_something_is() -> None:
    many = modules("", *(f"block.{number}.{leaf}" for number in range(200) for leaf in ("", "linear")))
    many = {path.rstrip("."): one for path, one in many.items()} | modules("block")
    tree = grow(many, order="depth", search="", marks={"block.7.linear": "critical"}, shown="block.150.linear")
    assert set(tree.expanded) == {".", ".block", ".block.7", ".block.150"}
    block = tree.nodes[0]["children"][0]
    assert block["nodeProps"]["severity"] == "critical inside"
    assert [one["nodeProps"]["mark"] for one in block["children"]].count("!!") == 1


def test_what_was_not_used_for_longest_makes_room() -> None:
    kept: Recent[str, int] = Recent(3)
    for number, name in enumerate("abc"):
        kept.put(name, number)
    assert kept.get("a") == 0
    kept.put("d", 3)
    assert [kept.get(name) for name in "abcd"] == [0, None, 2, 3]
    kept.put("large", 4, weight=9)
    assert [kept.get(name) for name in ("a", "c", "d", "large")] == [None, None, None, 4]


def test_what_several_ask_for_at_once_is_made_once() -> None:
    kept: Recent[str, int] = Recent(3)
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def make() -> int:
        calls.append(1)
        begun.set()
        go_on.wait(10)
        return 7

    found: list[int] = []
    askers = [threading.Thread(target=lambda: found.append(kept.made("a", make))) for _ in range(4)]
    for asker in askers:
        asker.start()
    assert begun.wait(10)
    assert kept.made("b", lambda: 1) == 1  # nothing else waits for it
    go_on.set()
    for asker in askers:
        asker.join(10)
    assert found == [7] * 4
    assert len(calls) == 1
    with pytest.raises(LogError):
        kept.made("c", lambda: Library(Path("nowhere")).open("x"))
    assert kept.made("c", lambda: 2) == 2


def test_a_large_run_is_judged_by_another_process_and_as_by_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(tmp_path, "run", nan_at=12)
    data = load(path)
    monkeypatch.setattr(diagnoses, "LARGE", 0)
    monkeypatch.setattr(diagnoses, "_LATER", 0.0)
    monkeypatch.setattr(diagnoses, "diagnose", None)  # not here
    looked = diagnoses.Diagnoses()
    first = looked.of(data, "1")
    assert "Judging" in (first.note or "")
    assert {one.kind for one in first.findings} <= {one["kind"] for one in data.events.to_pylist()}
    while looked.serial == 0:
        time.sleep(0.02)
    found = looked.of(data, "1")
    assert found.note is None
    assert repr(found.findings) == repr(tuple(diagnose(data)))  # a NaN is not what another NaN is
    assert found.worst()["block.1"] == "critical"


def test_a_run_that_cannot_be_judged_says_why(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no run"):
        judge(tmp_path / "nothing")


def test_judging_does_not_run_what_lies_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LogError, match="no run"):
        judge(tmp_path / "nothing")


def test_only_listed_runs_are_opened_and_nothing_is_read_twice(tmp_path: Path) -> None:
    inside = new_run(tmp_path / "runs", "inside")
    outside = new_run(tmp_path / "other", "outside")
    writer = Writer(inside)
    assert writer.submit(lambda: {"scalars": scalar_rows(0, loss=1.0)})
    assert writer.flush()
    library = Library(tmp_path / "runs")
    for name in (f"../other/{outside.name}", str(outside), "", ".", "..", "inside"):
        with pytest.raises(LogError, match="choose one of the list"):
            library.open(name)
    first, version = library.open(inside.name)
    assert library.open(inside.name)[0] is first
    assert writer.submit(lambda: {"stats": stats_rows(4)})
    assert writer.close()
    second, changed = library.open(inside.name)
    assert changed != version
    assert second is not first
    assert [one.sampled_steps for one in library.listing()] == [1]


def test_a_run_that_cannot_be_read_is_listed_as_such(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    (run / "run.json").write_text("{")
    assert [one.state for one in Library(tmp_path).listing()] == ["unreadable"]


def test_the_choices_of_a_run(tmp_path: Path) -> None:
    path = record(tmp_path, "run", steps=6)
    library = Library(tmp_path)
    facts = Facts(library.open(path.name)[0], StepsOfParts())
    assert facts.steps.tolist() == [0, 2, 4]
    assert [facts.nearest_step(step) for step in (None, -7, 1, 3, 99)] == [None, 0, 0, 2, 4]
    assert facts.sites == ["activation", "activation_grad", "parameter", "parameter_grad", "update"]
    assert facts.modules["shared"].calls == 2
    assert facts.tensors("stem", "parameter") == ["bias", "weight"]
    assert facts.tensors(MARKUP, "parameter") == ["bias", "weight"]
    assert facts.tensors("stem", "tensor") == []
    assert facts.scalars[:2] == ["loss", "accuracy"]
    for text, module in (
        ("(model)", ""),
        ("stem.weight", "stem"),
        ("6 · shared call 1", "shared"),
        ("&lt;img src=x onerror=pwned=1&gt;.bias", MARKUP),
        ("block.2", "block.2"),
        ("ReLU", None),
    ):
        assert facts.module_in(text) == module


def test_the_update_ratio_is_offered_for_updates_alone() -> None:
    assert "update_ratio" in statistics_of("update")
    assert "update_ratio" not in statistics_of("activation")


def test_events_that_are_no_mere_facts_are_findings() -> None:
    def event(kind: str, severity: str, step: int | None, module: str | None = None) -> dict[str, object]:
        return {
            "kind": kind, "severity": severity, "step": step, "module": module, "site": None, "tensor": None,
            "value": 1.0, "threshold": None, "message": None,
        }  # fmt: skip

    found = from_events(
        [
            event("a", "warning", 3, "m"),
            event("a", "warning", 4, "m"),
            event("b", "critical", None),
            event("c", "info", 1),
        ]
    )
    assert [(one.kind, one.step, one.module) for one in found] == [("b", 0, None), ("a", 3, "m")]
