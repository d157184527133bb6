"""What comes out of the gate: compared with rows filtered by hand, and searched byte by byte for what may not leave."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from log_rows import new_run, stats_rows

from statsbridge.errors import PolicyError, Retry
from statsbridge.log.schema import SCHEMAS, to_table
from statsbridge.mirror.contract import CHANNELS, Destination, RunInfo
from statsbridge.mirror.gate import Gate, make_gate
from statsbridge.mirror.hashing import KEY_FILE, Namer, key_trouble, load_key
from statsbridge.mirror.policy import Grant, Policy
from statsbridge.mirror.policy_file import STATISTICS, Limits, read_policy_file
from statsbridge.mirror.state import mirror_name
from statsbridge.mirror.tail import Chunk, Cursor

EVERYTHING = frozenset(CHANNELS)
MODULES = ("", "secret_encoder", "secret_encoder.conv", "secret_head")


def table(name: str, columns: dict[str, Any]) -> pa.Table:
    """Rows as a reader of the record has them."""
    rows = to_table(name, columns)
    numbers = pa.array(np.arange(rows.num_rows))
    rows = rows.append_column("seq", numbers).append_column("attempt", pa.array(np.zeros(rows.num_rows, np.int64)))
    return rows.select(SCHEMAS[name].names)


def chunk() -> Chunk:
    """Something in each table, secrets in every text."""
    modules = {
        "step": 0,
        "module": list(MODULES),
        "type": ["SecretNet", "SecretEncoder", "Conv2d", "Linear"],
        "parent": [None, "", "secret_encoder", ""],
        "call": 0,
        "order": [3, 1, 0, 2],
        "depth": [2, 1, 1, 2],
        "leaf": [False, False, True, True],
        "parameters": [0, 0, 1234567, 7],
        "order_source": "runtime",
    }
    stats = stats_rows(
        10,
        rows=6,
        module=["secret_encoder.conv", "secret_head", "secret_encoder.conv", "secret_head", "secret_head", ""],
        type=["Conv2d", "Linear", "Conv2d", "Linear", "Linear", "SecretNet"],
        site=["activation", "activation", "parameter", "parameter", "update", "tensor"],
        tensor=["", "", "secret_weight", "secret_weight", "secret_weight", "secret scores"],
        histogram=np.arange(6 * 197).reshape(6, 197),
    )
    scalars = {
        "step": 10,
        "iteration": 10,
        "time": 1.7e9,
        "name": ["loss", "val/secret", "lr/0", "lr/SecretAdam/secret group", "grad_norm"],
        "value": [1.0, math.nan, 0.1, 0.2, math.inf],
    }
    events = {
        "step": [None, 10, 10, 11],
        "time": 1.7e9,
        "kind": ["note", "internal_error", "vanishing", "A secret kind"],
        "severity": ["info", "warning", "critical", "info"],
        "module": [None, "secret_head", "secret_encoder.conv", None],
        "site": [None, "parameter", "activation", None],
        "tensor": [None, "secret_weight", "", None],
        "value": [math.nan, None, 1e-9, None],
        "threshold": [None, None, 1e-6, None],
        "message": ["the secret patient", "File /home/secret/train.py, line 1", "secret_encoder.conv fades", "secret"],
    }
    return Chunk(
        table("modules", modules),
        table("stats", stats),
        table("scalars", scalars),
        table("events", events),
        Cursor(4, 6, 5, 4),
    )


def gate(
    run: Path | None = None, *, channels: frozenset[str] = EVERYTHING, restricted: bool = False, **limits: Any
) -> Gate:
    return Gate(Grant(channels, (Limits(**limits),)), restricted=restricted, run=run)


def tables(chunk: Chunk) -> dict[str, pa.Table]:
    return {name: getattr(chunk, name) for name in SCHEMAS}


def same(rows: pa.Table, others: pa.Table) -> bool:
    """Equal values in equal columns; NaN is NaN."""
    return rows.schema.equals(others.schema) and repr(rows.to_pylist()) == repr(others.to_pylist())


def texts(chunk: Chunk) -> str:
    """All bytes of all tables, as they would be written to a file, and all that their dictionaries hold."""
    sink = io.BytesIO()
    for rows in tables(chunk).values():
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
    kept = [
        piece.dictionary.to_pylist()
        for rows in tables(chunk).values()
        for column in rows.columns
        if pa.types.is_dictionary(column.type)
        for piece in column.chunks
    ]
    return sink.getvalue().decode("latin-1") + str(kept)


def test_without_limits_everything_passes_unchanged() -> None:
    given = chunk()
    passed = Gate(Grant(EVERYTHING), restricted=False, run=None).chunk(given)
    for name, rows in tables(given).items():
        assert same(tables(passed)[name], rows)
    assert passed.cursor == given.cursor


def test_schemas_and_cursor_stay_whatever_is_dropped(tmp_path: Path) -> None:
    given = chunk()
    for limits in (
        {"tables": ()},
        {"sites": (), "scalars": (), "statistics": ()},
        {"names": "hashed", "sites": ("update",), "scalars": ("loss",)},
    ):
        passed = gate(new_run(tmp_path), restricted=True, **limits).chunk(given)
        for name, rows in tables(passed).items():
            assert rows.schema.equals(SCHEMAS[name])
        assert passed.cursor == given.cursor


def test_sites_statistics_and_scalars_against_rows_chosen_by_hand() -> None:
    given = chunk()
    passed = gate(sites=("activation", "up*"), statistics=("mean", "k*"), scalars=("loss", "lr/*")).chunk(given)
    kept = ("mean", "kurtosis", "kl_unit_gaussian")
    dropped = ("count", "nan_count", "inf_count", "std", "skewness", "min", "max", "abs_mean", "l2", "zero_fraction",
               "update_ratio", "histogram")  # fmt: skip
    assert passed.stats.to_pylist() == [
        {name: None if name in dropped else value for name, value in row.items()}
        for row in given.stats.to_pylist()
        if row["site"] in ("activation", "update")
    ]
    assert all(passed.stats[name].null_count == 0 for name in kept)
    assert [row["name"] for row in passed.scalars.to_pylist()] == ["loss", "lr/0", "lr/SecretAdam/secret group"]
    assert passed.modules["parameters"].null_count == 4  # as telling as the counts
    # An event at a site that may not leave goes; of the others the numbers, for they may be of such a statistic.
    events = passed.events.to_pylist()
    assert [event["kind"] for event in events] == ["note", "vanishing", "A secret kind"]
    assert {event["value"] for event in events} == {event["threshold"] for event in events} == {None}
    # The text of an event tells the same numbers.
    assert events[1]["message"] == "vanishing (critical): secret_encoder.conv activation"


def test_no_name_of_a_dropped_row_stays_in_the_dictionaries() -> None:
    passed = texts(gate(sites=("update",), scalars=("loss",)).chunk(chunk()))
    assert "secret_head" in passed
    for gone in ("val/secret", "secret group", "secret scores", "activation_grad"):
        assert gone not in passed
    assert "activation" not in gate(sites=("update",)).chunk(chunk()).stats["site"].chunk(0).dictionary.to_pylist()


@pytest.mark.parametrize(
    ("limits", "open_tables"),
    [
        ({"tables": ("scalars",)}, {"scalars"}),
        ({"tables": ("stats", "events")}, {"modules", "stats", "events"}),
        ({"channels": frozenset({"metrics"})}, {"modules", "stats", "scalars"}),
        ({"channels": frozenset({"alerts"})}, {"events"}),
        ({"channels": frozenset({"histograms"})}, {"modules", "stats"}),
        ({"channels": frozenset({"config"})}, set()),
    ],
)
def test_tables_that_may_not_leave_are_empty(limits: dict[str, Any], open_tables: set[str]) -> None:
    passed = gate(**limits).chunk(chunk())
    assert {name for name, rows in tables(passed).items() if rows.num_rows} == open_tables
    if not open_tables:
        assert "secret" not in texts(passed)


def test_histograms_need_their_channel() -> None:
    assert gate(channels=frozenset({"metrics"})).chunk(chunk()).stats["histogram"].null_count == 6
    stats = gate(channels=frozenset({"histograms"})).chunk(chunk()).stats
    assert [name for name in STATISTICS if stats[name].null_count == 0] == ["histogram"]


def test_hashed_names_leave_nothing_to_read(tmp_path: Path) -> None:
    given, passed = chunk(), gate(new_run(tmp_path), names="hashed").chunk(chunk())
    told = texts(passed)
    assert "secret" in texts(given)
    for name in ("secret", "Secret", "Conv2d", "Linear", "encoder", "conv", "weight", "/home", "patient"):
        assert name not in told
    # All numbers are as before, and so is what has no name.
    for rows, before in ((passed.stats, given.stats), (passed.modules, given.modules)):
        for column in rows.column_names:
            if column not in {"module", "type", "parent", "tensor"}:
                assert rows[column].equals(before[column])
    hashes = dict(zip(given.modules["module"].to_pylist(), passed.modules["module"].to_pylist(), strict=True))
    assert hashes.pop("") == ""
    assert len(set(hashes.values())) == 3
    assert all(re.fullmatch(r"module-[0-9a-f]{16}", name) for name in hashes.values())
    assert passed.modules["parent"].to_pylist() == [None, "", hashes["secret_encoder"], ""]
    assert passed.stats["module"].to_pylist() == [
        *([hashes["secret_encoder.conv"], hashes["secret_head"]] * 2), hashes["secret_head"], ""
    ]  # fmt: skip
    # One type, one hash, which is no module's.
    assert passed.stats["type"].to_pylist()[0] == passed.modules["type"].to_pylist()[2]
    assert re.fullmatch(r"type-[0-9a-f]{16}", passed.stats["type"].to_pylist()[0])
    tensors = passed.stats["tensor"].to_pylist()
    assert tensors[:2] == ["", ""]
    assert tensors[2] == tensors[3] == tensors[4] != tensors[5]


def test_scalars_that_we_name_ourselves_stay(tmp_path: Path) -> None:
    passed = gate(new_run(tmp_path), names="hashed").chunk(chunk())
    loss, secret, first, group, norm = passed.scalars["name"].to_pylist()
    assert (loss, first, norm) == ("loss", "lr/0", "grad_norm")
    assert re.fullmatch(r"scalar-[0-9a-f]{16}", secret)
    assert re.fullmatch(r"lr/group-[0-9a-f]{16}/group-[0-9a-f]{16}", group)
    spelled = gate(new_run(tmp_path), names="hashed", scalars=("val/secret", "l*")).chunk(chunk())
    assert spelled.scalars["name"].to_pylist()[:3] == ["loss", "val/secret", "lr/0"]


def test_one_key_one_hash(tmp_path: Path) -> None:
    run, other = new_run(tmp_path), new_run(tmp_path)
    first = gate(run, names="hashed").chunk(chunk())
    again = gate(run, names="hashed").chunk(chunk())
    for name, rows in tables(first).items():
        assert same(tables(again)[name], rows)
    assert not gate(other, names="hashed").chunk(chunk()).modules["module"].equals(first.modules["module"])
    shared = [
        gate(run, names="hashed", key_file=str(tmp_path / "keys" / "shared")).chunk(chunk()).stats["module"]
        for run in (run, other)
    ]
    assert shared[0].equals(shared[1])


def test_the_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    gate(run, names="hashed").chunk(chunk())
    file = run / "mirrors" / KEY_FILE
    assert file in list(file.parent.iterdir())
    if sys.platform != "win32":
        assert file.stat().st_mode & 0o777 == 0o600
        file.chmod(0o640)
        with pytest.raises(PolicyError, match="chmod 600"):
            gate(run, names="hashed").chunk(chunk())
        file.chmod(0o600)
    key = load_key(file)
    assert len(key) == 32
    assert key == load_key(file) == bytes.fromhex(file.read_text().strip())
    file.write_text("short")
    with pytest.raises(PolicyError, match="does not hold the key"):
        gate(run, names="hashed").chunk(chunk())


def test_a_key_that_was_lost_is_missed_and_another_one_said(tmp_path: Path) -> None:
    def left(by: Gate) -> set[str]:
        return set(by.chunk(chunk()).stats["module"].to_pylist()) - {""}

    run = new_run(tmp_path)
    own = run / "mirrors" / KEY_FILE
    assert key_trouble(run) is None
    first, again = gate(run, names="hashed"), gate(run, names="hashed")
    assert left(first) == left(again)
    assert (first.key_changed, again.key_changed, key_trouble(run)) == (None, None, None)
    kept = own.read_bytes()
    assert kept.strip() not in (run / "mirrors" / "policy.keys-used").read_bytes()
    own.unlink()
    assert "put it back" in (key_trouble(run) or "")
    other = gate(run, names="hashed")
    assert left(other).isdisjoint(left(first))
    assert str(own) in (other.key_changed or "")
    assert "names left under 2 keys" in (key_trouble(run) or "")
    own.write_bytes(kept)
    assert "put it back" in (key_trouble(run) or ""), "names have left under the other one since"
    back = gate(run, names="hashed")
    assert left(back) == left(first)
    assert back.key_changed
    own.write_text("short")
    assert key_trouble(run)


@pytest.mark.parametrize("shared", [False, True])
def test_a_run_that_was_moved_does_not_miss_its_key(tmp_path: Path, shared: bool) -> None:
    run, file = new_run(tmp_path), tmp_path / "shared.key"
    gate(run, names="hashed", key_file=str(file) if shared else None).chunk(chunk())
    moved = run.rename(tmp_path / "elsewhere")
    assert key_trouble(moved) is None
    (file if shared else moved / "mirrors" / KEY_FILE).unlink()
    assert key_trouble(moved)


def test_the_same_key_in_another_file_is_no_other_key(tmp_path: Path) -> None:
    run, shared = new_run(tmp_path), tmp_path / "shared.key"
    gate(run, names="hashed").chunk(chunk())
    shared.write_bytes((run / "mirrors" / KEY_FILE).read_bytes())
    shared.chmod(0o600)
    moved = gate(run, names="hashed", key_file=str(shared))
    moved.chunk(chunk())
    assert moved.key_changed is None


KEYS = {"mlflow": "https://mlflow.example", "wandb": "https://wandb.example"}


def to_each(folder: Path, run: Path, backend: str) -> Gate:
    """The gate to one of two trackers, for each of which another file names another key."""
    texts = []
    for hashed in KEYS:
        rules = [
            f'[[destinations]]\nbackend = "{name}"\nurl = "{url}"\nnames = "{how}"\n'
            for (name, url), how in zip(
                KEYS.items(), ("hashed" if one == hashed else "plain" for one in KEYS), strict=True
            )
        ]
        texts.append(f'applies_to = "all"\nkey_file = "{folder / hashed}.key"\n' + "".join(rules))
    files = []
    for number, text in enumerate(texts):
        (folder / f"{number}.toml").write_text(text)
        files.append(read_policy_file(folder / f"{number}.toml", "project"))
    policy = Policy(frozenset(file for file in files if file is not None))
    return make_gate(policy, Destination(backend, KEYS[backend], explicit=True), restricted=False, run=run)


def serve(folder: Path, run: Path, backend: str) -> Gate:
    """Let names leave to there, as a mirror does."""
    made = to_each(folder, run, backend)
    made.chunk(chunk())
    (run / "mirrors" / f"{mirror_name(Destination(backend, KEYS[backend], explicit=True))}.json").write_text("{}")
    return made


def test_two_mirrors_may_have_two_keys(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for backend in (*KEYS, *KEYS):
        assert serve(tmp_path, run, backend).key_changed is None
        assert key_trouble(run) is None
    assert len((run / "mirrors" / "policy.keys-used").read_text().splitlines()) == 2
    # Each is missed, the one of the mirror that went on last and the other's.
    for backend in KEYS:
        file = tmp_path / f"{backend}.key"
        kept = file.read_bytes()
        file.unlink()
        assert str(file) in (key_trouble(run) or "")
        file.write_bytes(kept)
        file.chmod(0o600)
        assert key_trouble(run) is None
    # And a change of one is said of that one alone.
    (tmp_path / "mlflow.key").unlink()
    assert str(tmp_path / "mlflow.key") in (serve(tmp_path, run, "mlflow").key_changed or "")
    assert serve(tmp_path, run, "wandb").key_changed is None
    assert "names left under 2 keys" in (key_trouble(run) or "")


def test_a_mirror_that_gets_another_key_file_is_said(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert serve(tmp_path, run, "mlflow").key_changed is None
    (tmp_path / "other").mkdir()
    assert str(tmp_path / "other" / "mlflow.key") in (serve(tmp_path / "other", run, "mlflow").key_changed or "")


def test_what_an_older_version_wrote_of_the_keys_counts_for_every_mirror(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    serve(tmp_path, run, "mlflow")
    used = run / "mirrors" / "policy.keys-used"
    line = json.loads(used.read_text())
    del line["mirror"]
    used.write_text(json.dumps(line) + "\nnot JSON\n")
    assert serve(tmp_path, run, "mlflow").key_changed is None
    assert key_trouble(run) is None
    assert serve(tmp_path, run, "wandb").key_changed, "which of them the key was for is not known"


def test_a_key_that_cannot_be_made_is_tried_again(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    (run / "mirrors").write_text("in the way")
    closed = gate(run, names="hashed")
    with pytest.raises(Retry, match=r"policy\.key"):
        closed.chunk(chunk())
    (run / "mirrors").unlink()
    assert closed.chunk(chunk()).stats.num_rows == 6
    with pytest.raises(PolicyError, match="no run folder"):
        gate(None, names="hashed").chunk(chunk())


def test_two_makers_of_a_key_end_up_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "policy.key"
    link = os.link

    def other_first(source: Path, target: Path) -> None:
        target.write_text("a" * 64)
        target.chmod(0o600)
        link(source, target)

    monkeypatch.setattr(os, "link", other_first)
    assert load_key(file) == bytes.fromhex("a" * 64)
    assert list(tmp_path.iterdir()) == [file]


def test_hashes_do_not_collide() -> None:
    namer = Namer(b"k" * 32)
    names = [f"layer.{number}" for number in range(20_000)]
    assert len({namer.name("module", name) for name in names}) == len(names)
    assert len({namer.name(kind, "x") for kind in ("module", "type", "tensor", "scalar", "group")}) == 5
    assert namer.name("module", "x") != Namer(b"l" * 32).name("module", "x")
    assert namer.name("module", "\ud800")  # a lone surrogate, which a name may hold


def test_messages_of_a_restricted_run_are_made_anew() -> None:
    passed = gate(restricted=True).chunk(chunk())
    assert passed.events["message"].to_pylist() == [
        "note (info): value nan",
        "internal_error (warning): secret_head parameter secret_weight",
        "vanishing (critical): secret_encoder.conv activation, value 1e-09, threshold 1e-06",
        "other (info)",
    ]
    assert passed.events["kind"].to_pylist() == ["note", "internal_error", "vanishing", "other"]
    assert "patient" not in texts(passed)
    unrestricted = gate().chunk(chunk())
    assert unrestricted.events["message"].to_pylist()[0] == "the secret patient"


@pytest.mark.parametrize("limits", [{"statistics": ("mean",)}, {"scalars": ("loss",)}])
def test_a_number_that_is_withheld_is_not_in_the_text_either(limits: dict[str, Any]) -> None:
    """A run that is not restricted, under a policy for all runs: a rule's text tells what it measured."""
    given = chunk()
    told = pa.array(["the loss is 9e+09"] * 4).dictionary_encode()
    events = given.events.set_column(given.events.schema.get_field_index("message"), "message", told)
    passed = gate(**limits).chunk(replace(given, events=events.cast(given.events.schema)))
    assert "9e+09" not in texts(passed)
    assert passed.events["message"].to_pylist() == [
        "note (info)",
        "internal_error (warning): secret_head parameter secret_weight",
        "vanishing (critical): secret_encoder.conv activation",
        "A secret kind (info)",
    ]
    assert "9e+09" in texts(gate(sites=("*",)).chunk(replace(given, events=events.cast(given.events.schema))))


def test_what_an_adapter_may_know_of_the_run(tmp_path: Path) -> None:
    info = RunInfo(
        "20260101-1", "secret name", tmp_path, datetime.now(UTC), {"lr": 1}, {"torch": "2.6"}, restricted=True
    )
    assert gate().info(info) is info
    closed = gate(channels=frozenset({"metrics"})).info(info)
    assert (closed.name, closed.config, closed.versions) == (info.id, {}, {})
    assert (closed.id, closed.path, closed.created, closed.restricted) == (info.id, info.path, info.created, True)


def test_channels() -> None:
    closed = gate(channels=frozenset({"metrics"}))
    assert [channel for channel in CHANNELS if closed.allows(channel)] == ["metrics"]
    with pytest.raises(ValueError, match="'metric' is no channel"):
        closed.allows("metric")


def test_from_a_file_to_the_rows(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(
        """
        names = "hashed"
        [[destinations]]
        backend = "mlflow"
        url = "http://127.0.0.1:5000"
        channels = ["metrics", "alerts"]
        sites = ["update"]
        statistics = ["std"]
        scalars = ["loss"]
        """
    )
    file = read_policy_file(tmp_path / "policy.toml", "project")
    assert file is not None
    policy = Policy(frozenset([file]))
    destination = Destination("mlflow", "http://127.0.0.1:5000", explicit=True)
    made = make_gate(policy, destination, restricted=True, run=new_run(tmp_path))
    passed = made.chunk(chunk())
    (row,) = passed.stats.to_pylist()
    assert (row["site"], row["mean"], row["histogram"]) == ("update", None, None)
    assert row["std"] == chunk().stats.to_pylist()[4]["std"]
    assert passed.scalars.to_pylist() == chunk().scalars.slice(0, 1).to_pylist()
    assert made.policy
    assert "secret" not in texts(passed)
    with pytest.raises(PolicyError, match="its port is 5001, not 5000"):
        make_gate(policy, Destination("mlflow", "http://127.0.0.1:5001", explicit=True), restricted=True, run=None)


def test_rows_in_several_pieces(tmp_path: Path) -> None:
    """A chunk that comes from several parts, each with dictionaries of its own."""
    whole = chunk()
    pieces = {
        name: pa.concat_tables([to_pieces(rows.slice(0, 2)), to_pieces(rows.slice(2))])
        for name, rows in tables(whole).items()
    }
    run = new_run(tmp_path)
    for limits in (
        {"names": "hashed", "sites": ("activation", "parameter")},
        {"scalars": ("l*",), "statistics": ("std",)},
    ):
        one = gate(run, **limits).chunk(whole)
        other = gate(run, **limits).chunk(Chunk(**pieces, cursor=whole.cursor))
        for name in SCHEMAS:
            assert same(tables(one)[name], tables(other)[name])


def to_pieces(rows: pa.Table) -> pa.Table:
    """The same rows, with dictionaries of only what is in them."""
    columns = [
        rows[field.name].cast(pa.string()).dictionary_encode()
        if pa.types.is_dictionary(field.type)
        else rows[field.name]
        for field in rows.schema
    ]
    return pa.Table.from_arrays(columns, schema=rows.schema)
