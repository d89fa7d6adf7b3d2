"""verify: what cannot be read is named and unequal, and everything else is compared; rows without a column are rows."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from cdc.config import load_definition
from cdc.targets.lake_reader import Lake
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until
from tests.pipelines.apply_thread import ApplyThread, run_verify


@pytest.fixture(name="captured")
def _captured(tmp_path: Path, database: str) -> Captured:
    """Two tables with a key and one without a column, captured and applied to a lake."""
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, 'v' || i FROM generate_series(1, 100) i",
        "CREATE TABLE u (id int PRIMARY KEY, v text)",
        "INSERT INTO u SELECT i, 'v' || i FROM generate_series(1, 50) i",
        "CREATE TABLE z ()",
        "ALTER TABLE z REPLICA IDENTITY FULL",
        "INSERT INTO z DEFAULT VALUES",
    )
    captured = Captured(tmp_path, database)
    with captured.path.open("a") as definition:
        definition.write(f"sinks:\n- {{name: lake, type: delta, path: '{tmp_path}/lake/{{schema}}/{{table}}'}}\n")
    captured.copy()
    run_sql(database, "INSERT INTO z DEFAULT VALUES", "INSERT INTO z DEFAULT VALUES", "UPDATE t SET v = 'w'")
    apply(captured)
    return captured


def apply(captured: Captured) -> None:
    """Bring the lake to where the source is."""
    end = captured.stream()
    with ApplyThread(captured):
        lake = Lake.open(f"{captured.folder}/lake/{{schema}}/{{table}}")
        until(lambda: (r := lake.published()) and r.position >= end, lambda: "the lake")


def place(captured: Captured, table: str) -> Path:
    return captured.folder / "lake" / "public" / table


def live_file(captured: Captured) -> Path:
    """A data file that the newest version of t has."""
    return Path(DeltaTable(str(place(captured, "t"))).file_uris()[0].removeprefix("file://"))


DAMAGES: dict[str, Callable[[Captured], Any]] = {
    "file missing": lambda captured: live_file(captured).unlink(),
    "file cut off": lambda captured: live_file(captured).write_bytes(live_file(captured).read_bytes()[:200]),
    "file overwritten": lambda captured: live_file(captured).write_bytes(b"PAR1" + b"\xff" * 500 + b"PAR1"),
    "log missing": lambda captured: shutil.rmtree(place(captured, "t") / "_delta_log"),
    "all missing": lambda captured: shutil.rmtree(place(captured, "t")),
}
QUICK = ("file missing", "file cut off", "log missing")


def test_a_target_or_a_record_that_cannot_be_read_is_named_and_the_others_are_compared(
    captured: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = captured.folder / "whole"
    shutil.copytree(place(captured, "t"), whole)
    for name in QUICK:
        check_damage(captured, capsys, name)
        shutil.rmtree(place(captured, "t"))
        shutil.copytree(whole, place(captured, "t"))

    # a sink whose record cannot be read
    with captured.path.open("a") as definition:
        definition.write(f"- {{name: find, type: search, path: '{captured.folder}/nowhere', tables: [public.u]}}\n")
    assert [sink.name for sink in load_definition(captured.path).sinks] == ["lake", "find"]
    status, found = run_verify(captured, capsys, "--against", "log")
    states = {(t["sink"], t["topic"]): (t["equal"], t["state"]) for t in found["result"]["tables"]}
    assert status == 4
    assert states == {
        ("lake", "public.t"): (True, "streaming"),
        ("lake", "public.u"): (True, "streaming"),
        ("lake", "public.z"): (True, "streaming"),
        ("find", "public.u"): (False, "unreadable"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("damage", [name for name in DAMAGES if name not in QUICK])
def test_further_damage_of_a_target_is_named_and_the_others_are_compared(
    captured: Captured, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    check_damage(captured, capsys, damage)


def check_damage(captured: Captured, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    DAMAGES[damage](captured)
    status, found = run_verify(captured, capsys, "--against", "log")
    tables = {table["topic"]: table for table in found["result"]["tables"]}
    assert (status, found["error"]["code"]) == (4, "CDC-6001"), damage
    assert {topic: table["equal"] for topic, table in tables.items()} == {
        "public.t": False, "public.u": True, "public.z": True,
    }  # fmt: skip
    assert tables["public.t"]["compared"] is False
    assert tables["public.t"]["reason"].startswith("CDC-3003 ")
    assert "cdc replay SINK --tables TABLE" in tables["public.t"]["reason"]


def test_a_table_without_columns_is_equal_while_it_has_as_many_rows(
    captured: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    with captured.reading(), ApplyThread(captured):
        for rows, status, modes in ((3, 0, ("rows",)), (2, 4, ("rows", "checksum", "count"))):
            for against, mode in product(("log", "source"), modes):
                got, found = run_verify(captured, capsys, "--against", against, "--mode", mode, "z")
                (z,) = found["result"]["tables"]
                assert (got, z["equal"], z["rows"], z["target_rows"]) == (status, status == 0, 3, rows), z
            lose_one(captured)


def lose_one(captured: Captured) -> None:
    """What a careless hand does to the table without columns."""
    z = DeltaTable(str(place(captured, "z")))
    first = min((row["_position"], row["_ordinal"]) for row in pa.table(z.scan()).to_pylist())
    z.delete(f"_position = {first[0]} AND _ordinal = {first[1]}")
