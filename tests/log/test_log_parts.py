"""Parts: named by what they hold, whole or reported."""

import zlib
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from log_rows import new_run, scalar_rows, stats_rows, write_run

from statsbridge import DamagedPart, SchemaTooNew, StatsBridgeWarning
from statsbridge.log import load
from statsbridge.log.files import write_durably
from statsbridge.log.parts import list_parts, read_part


def test_names_give_table_rank_rows_and_checksum(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, *({"stats": stats_rows(step, rows=3)} for step in range(4)), rank=11)
    parts = list_parts(run, "stats")
    assert [(part.rank, part.first, part.last, part.rows) for part in parts] == [
        (11, 0, 2, 3),
        (11, 3, 5, 3),
        (11, 6, 8, 3),
        (11, 9, 11, 3),
    ]
    for part in parts:
        assert part.path.parent == run / "stats" / "rank=11"
        checksum = zlib.crc32(part.path.read_bytes())
        assert part.path.name == f"{part.first:012d}-{part.last:012d}.{checksum:08x}.parquet"
        assert read_part(part)["seq"].to_pylist() == list(range(part.first, part.last + 1))


@pytest.mark.parametrize("stride", [41, pytest.param(1, marks=pytest.mark.slow)])
def test_any_flipped_byte_and_any_truncation_is_noticed(tmp_path: Path, stride: int) -> None:
    run = new_run(tmp_path)
    write_run(run, {"scalars": scalar_rows(0, loss=1.0)})
    [part] = list_parts(run, "scalars")
    whole = part.path.read_bytes()
    for position in [*range(0, len(whole), stride), len(whole) - 1]:
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        for damaged in (flipped, whole[:position]):
            part.path.write_bytes(damaged)
            with pytest.raises(DamagedPart, match=part.name):
                read_part(part)
    part.path.write_bytes(whole)
    assert read_part(part).num_rows == 1


def test_a_part_that_is_no_parquet_though_its_checksum_is_right(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, {"scalars": scalar_rows(0, loss=1.0)})
    [part] = list_parts(run, "scalars")
    for junk in (b"", b"junk", b"\0" * 4096):
        part.path.write_bytes(junk)
        with pytest.raises(DamagedPart, match=part.name):
            read_part(replace(part, checksum=zlib.crc32(junk)))


def test_a_damaged_part_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, *({"scalars": scalar_rows(step, loss=step)} for step in range(4)))
    parts = list_parts(run, "scalars")
    before = parts[1].path.read_bytes()
    parts[1].path.write_bytes(before[:-7])
    parts[2].path.unlink()
    (parts[2].path.parent / ".unfinished.tmp").write_bytes(b"PAR1")

    data = load(run)
    with pytest.warns(StatsBridgeWarning, match=f"^statsbridge: .*({parts[1].path.name}|rows 2 to 2)"):
        assert data.scalars["step"].to_pylist() == [0, 3]
    damaged, missing = data.damaged
    assert "no part holds rows 2 to 2" in str(missing)
    assert isinstance(damaged, DamagedPart)
    assert parts[1].name in str(damaged)
    assert parts[1].path.read_bytes() == before[:-7], "reading repairs nothing"


def test_a_part_that_goes_after_load_is_reported_too(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, *({"scalars": scalar_rows(step, loss=step)} for step in range(2)))
    data = load(run)
    gone = list_parts(run, "scalars")[0]
    gone.path.unlink()
    with pytest.warns(StatsBridgeWarning, match=gone.path.name):
        assert data.scalars["step"].to_pylist() == [1]


def test_a_part_of_the_future_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, {"scalars": scalar_rows(0, loss=1.0)})
    [part] = list_parts(run, "scalars")
    table = pq.ParquetFile(part.path).read()
    pq.write_table(table.replace_schema_metadata({"statsbridge.schema_version": "3"}), part.path)
    part = replace(part, checksum=zlib.crc32(part.path.read_bytes()))
    with pytest.raises(SchemaTooNew, match="version 3"):
        read_part(part)


def test_an_older_part_that_lacks_a_column_is_read_with_nulls(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    write_run(run, {"scalars": scalar_rows(0, loss=1.0)})
    [part] = list_parts(run, "scalars")
    table = pq.ParquetFile(part.path).read().drop_columns(["epoch", "kind"])
    pq.write_table(table, part.path)
    part = replace(part, checksum=zlib.crc32(part.path.read_bytes()))
    rows = read_part(part)
    assert rows["kind"].to_pylist() == [None]
    assert rows.schema.field("kind").type == pa.dictionary(pa.int32(), pa.string())


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_rubbish(tmp_path: Path) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    (target / "inside").touch()
    with pytest.raises(OSError, match="taken"):
        write_durably(target, b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
