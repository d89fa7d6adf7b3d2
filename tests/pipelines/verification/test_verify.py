"""verify: a real source, a made Delta target, and a stand-in that answers for the apply process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from cdc.catalog import Catalog
from cdc.config import load_definition
from cdc.config.job_options import VerifyMode
from cdc.errors import ConfigError, PositionNotReached
from cdc.log.layout import CommitInfo, LogIdentity
from cdc.log.segments import SegmentLimits
from cdc.log.writer import LogWriter
from cdc.position import Position
from cdc.postgres.connection import connect
from pipelines.verification.verify import VerifyOptions, verify
from tests.pipelines.kinds import ROWS, TABLE, Ground, replaced, typed


@pytest.fixture
def ground(tmp_path: Path, database: str) -> Iterator[Ground]:
    """Rows at the source; the target is not written yet."""
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        f"name: kinds\nsource: {{dsn: '{database}'}}\ntables: [{{match: 'public.*'}}]\n"
        f"log: {{path: '{tmp_path}/log'}}\n"
        f"sinks: [{{type: delta, name: lake, path: '{tmp_path}/lake/{{schema}}/{{table}}'}}]\n"
    )
    definition = load_definition(path)
    with connect(database) as conn:
        conn.execute(TABLE)
        conn.execute(ROWS)
    identity = LogIdentity(system_id="1", database="kinds")
    writer = LogWriter.open(Path(definition.log.path), identity, SegmentLimits(size=1 << 20, age=60.0))
    writer.commit([], CommitInfo(last=Position(1), committed_at=0, timeline=1))
    with Catalog.open(definition.catalog.url) as catalog:
        yield Ground(definition, catalog, tmp_path / "lake" / "public" / "kinds", database)


def test_every_type_that_a_target_holds_exactly_is_equal_to_its_source(ground: Ground) -> None:
    verdict = ground.verify(typed())
    assert verdict.equal, verdict
    assert (verdict.rows, verdict.target_rows) == (3, 3)
    assert ground.released == ["{}"]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("words", ["a", None, None]),
        ("words", ["a", "", ""]),
        ("big", [2**63 - 2, 0, None]),
        ("yes", [True, True, None]),
        ("half", [0.1, 0.0, None]),
        ("price", [Decimal("12.51"), Decimal("-0.01"), None]),
        ("free", ["1.1", "NaN", None]),
        ("raw", [b"\x00\xff", None, None]),
    ],
)
def test_one_wrong_value_is_found_and_named(ground: Ground, column: str, values: list[object]) -> None:
    verdict = ground.verify(replaced(typed(), column, values))
    assert not verdict.equal
    assert [entry["columns"] for entry in verdict.differing] == [[column]]
    assert verdict.counts == {"missing": 0, "extra": 0, "differing": 1}


def test_a_dropped_and_a_duplicated_row_are_named_by_key(ground: Ground) -> None:
    rows = typed()
    verdict = ground.verify(pa.concat_tables([rows.slice(1), rows.slice(2)]))
    assert verdict.missing == [["1"]]
    assert verdict.extra == [["3"]]


def test_a_column_that_the_target_lacks_is_a_difference(ground: Ground) -> None:
    verdict = ground.verify(typed().drop_columns(["doc"]))
    assert not verdict.equal
    assert verdict.reason == "the target does not have these columns: ['doc']"


def test_what_commits_after_the_snapshot_does_not_disturb_it(ground: Ground) -> None:
    write_deltalake(str(ground.target), typed())

    def change() -> None:
        with connect(ground.dsn) as conn:
            conn.execute("DELETE FROM public.kinds")

    with ground.apply(before_answer=change):
        assert ground.report().equal


def test_a_sink_that_ran_ahead_gets_another_snapshot(ground: Ground) -> None:
    write_deltalake(str(ground.target), typed())
    with ground.apply(passed=2):
        assert ground.report().equal


def test_a_table_that_is_not_streaming_is_reported_and_not_equal(ground: Ground) -> None:
    ground.state = "snapshotting"
    verdict = ground.verify(typed())
    assert (verdict.equal, verdict.state, verdict.rows) == (False, "snapshotting", 0)
    assert verdict.reason == "a full copy of the table has not ended"


def test_a_table_that_the_sink_does_not_list_is_reported(ground: Ground) -> None:
    with connect(ground.dsn) as conn:
        conn.execute("CREATE TABLE public.late (id int PRIMARY KEY)")
    write_deltalake(str(ground.target), typed())
    with ground.apply():
        states = {verdict.topic: verdict.state for verdict in ground.report().tables}
    assert states == {"public.kinds": "streaming", "public.late": "absent"}


def test_a_table_with_a_dot_in_its_name_goes_by_its_topic(ground: Ground) -> None:
    with connect(ground.dsn) as conn:
        conn.execute('CREATE TABLE public."late.one" (id int PRIMARY KEY)')
    write_deltalake(str(ground.target), typed())
    with ground.apply():
        (verdict,) = ground.report(tables=('public."late.one"',)).tables
    assert (verdict.topic, verdict.state) == ('public."late.one"', "absent")


def test_without_an_apply_process_there_is_no_cut(ground: Ground) -> None:
    with pytest.raises(PositionNotReached, match="has never run"):
        ground.report()


def test_a_sink_that_does_not_answer_is_named_when_the_time_is_over(ground: Ground) -> None:
    ground.alive()
    with pytest.raises(PositionNotReached, match="'lake'"):
        verify(ground.definition, VerifyOptions(timeout=0.2))
    assert not ground.catalog.commands.pending("kinds", "cut")


def test_an_unknown_sink_or_table_is_refused(ground: Ground) -> None:
    with pytest.raises(ConfigError, match="unknown sink 'nowhere'"):
        ground.report(sinks=("nowhere",))
    with ground.apply(), pytest.raises(ConfigError, match="no captured table"):
        ground.report(tables=("nothing",))


@pytest.mark.parametrize(("rows", "extra"), [(2, []), (3, [["3"]])])
def test_what_the_publication_keeps_back_is_not_missed(ground: Ground, rows: int, extra: list[list[str]]) -> None:
    with connect(ground.dsn) as conn:
        conn.execute("CREATE PUBLICATION cdc_kinds_pub FOR TABLE public.kinds (id, words) WHERE (id < 3)")
    verdict = ground.verify(typed().select(["id", "words", "_position"]).slice(0, rows))
    assert verdict.equal is not bool(extra), verdict
    assert (verdict.rows, verdict.extra) == (2, extra)


def spoiled() -> dict[str, pa.Table]:
    """The rows with one thing wrong in each; `order` is not wrong."""
    rows = typed()
    place = rows.schema.get_field_index("small")
    return {
        "order": rows.take([2, 0, 1]),
        "missing": rows.slice(1),
        "extra": pa.concat_tables([rows, replaced(rows.slice(0, 1), "id", [4])]),
        "value": replaced(rows, "big", [1, 0, None]),
        "type": rows.set_column(place, "small", pa.array(["7", "-01", None])),
        "empty": replaced(rows, "words", ["a", None, None]),
        "twice": pa.concat_tables([rows, rows.slice(2)]),
        "swapped": replaced(rows, "words", ["", "a", None]),
        "exchanged": replaced(rows, "id", [1, 2, 4]),
    }


SAME_COUNT = {"value", "type", "empty", "swapped", "exchanged"}


@pytest.mark.parametrize("mode", VerifyMode)
def test_every_mode_finds_what_it_promises_to_find_and_nothing_else(ground: Ground, mode: VerifyMode) -> None:
    found = {}
    for name, rows in spoiled().items():
        shutil.rmtree(ground.target, ignore_errors=True)
        verdict = ground.verify(rows, mode=mode)
        assert verdict.compared
        assert verdict.mode == mode
        found[name] = verdict.equal
    unseen = {"order"} | (SAME_COUNT if mode is VerifyMode.COUNT else set())
    assert found == {name: name in unseen for name in spoiled()}


def test_a_digest_names_no_row_and_is_made_by_the_server(ground: Ground) -> None:
    verdict = ground.verify(replaced(typed(), "half", [0.1, 0.0, None]), mode=VerifyMode.CHECKSUM)
    assert (verdict.mode, verdict.equal, verdict.mismatched) == ("checksum", False, 1)
    assert verdict.reason == "the digests differ; --mode rows names the keys"
    with connect(ground.dsn) as conn:
        conn.execute("UPDATE public.kinds SET half = 0 WHERE id = 2")
    with ground.apply():
        assert ground.report(mode=VerifyMode.CHECKSUM).equal


@pytest.mark.parametrize("mode", VerifyMode)
def test_of_parked_keys_nothing_is_said_but_that_there_are_some(ground: Ground, mode: VerifyMode) -> None:
    ground.parked = (("2",), ("9",))
    rows = typed()
    verdict = ground.verify(pa.concat_tables([rows.slice(0, 1), rows.slice(2)]), mode=mode)
    assert (verdict.equal, verdict.mode, verdict.parked, verdict.parked_keys) == (True, "rows", 2, [["2"], ["9"]])
    shutil.rmtree(ground.target)
    verdict = ground.verify(rows.slice(2), mode=mode)
    assert (verdict.missing, verdict.parked) == ([["1"]], 2)


@pytest.mark.parametrize("mode", [VerifyMode.ROWS, VerifyMode.CHECKSUM])
def test_what_was_compared_is_kept_and_what_was_counted_is_not(ground: Ground, mode: VerifyMode) -> None:
    ground.verify(typed().slice(1), mode=VerifyMode.COUNT)
    assert ground.catalog.verified.ls("kinds") == []
    shutil.rmtree(ground.target)
    ground.verify(typed().slice(1), mode=mode)
    (wrong,) = ground.catalog.verified.ls("kinds")
    assert (wrong.sink, wrong.topic, wrong.rows, wrong.mismatched, wrong.equal_at) == (
        "lake",
        "public.kinds",
        3,
        1,
        None,
    )
    shutil.rmtree(ground.target)
    before = datetime.now(UTC)
    ground.verify(typed(), mode=mode)
    (right,) = ground.catalog.verified.ls("kinds")
    assert (right.mismatched, right.ended, right.ranges) == (0, True, 1)
    assert right.through is not None
    assert right.equal_at is not None
    assert before <= right.through <= right.equal_at


def placed(**columns: list[object]) -> pa.Table:
    """The first row and the third, a deleted one and an older state of the first, with the columns of a mode."""
    rows = typed()
    old, deleted = replaced(rows, "words", ["old", None, None]).slice(0, 1), replaced(rows, "id", [4, 5, 6]).slice(0, 1)
    found = pa.concat_tables([rows, old, deleted, deleted])
    for name, values in columns.items():
        found = found.append_column(name, pa.array(values))
    return found


# of what placed() gives: three rows of now, one of before, and a row that came and went
HISTORIES = {
    "scd2": {"__END_AT": [None, None, None, 3, 4, 5]},
    "append": {
        "_op": ["u", "r", "c", "c", "c", "d"],
        "_ordinal": [1, 0, 0, 0, 0, 2],
        "_generation": pa.nulls(6, pa.int64()),
    },
}


@pytest.mark.parametrize("keeping", [*HISTORIES, "soft_delete"])
@pytest.mark.parametrize("mode", [VerifyMode.ROWS, VerifyMode.CHECKSUM])
def test_of_a_target_with_a_past_the_rows_of_now_are_compared(ground: Ground, keeping: str, mode: VerifyMode) -> None:
    if keeping == "soft_delete":
        rows = placed(_deleted=[False] * 6).slice(0, 5).filter(pa.array([True, True, True, False, True]))
        rows = rows.set_column(rows.num_columns - 1, "_deleted", pa.array([False, False, False, True]))
    else:
        rows = placed(**HISTORIES[keeping])
    verdict = ground.kept(keeping, rows, mode=mode)
    assert (verdict.equal, verdict.rows, verdict.target_rows) == (True, 3, 3), verdict
    verdict = ground.kept(keeping, rows.slice(1), mode=mode)
    assert not verdict.equal


@pytest.mark.parametrize(
    ("op", "position", "generation", "missing"),
    [
        ("t", 1, None, [["2"], ["3"]]),  # at the truncate's place, and not behind it as the first is
        ("g", 9, 1, []),
        ("g", 9, 2, [["1"], ["2"], ["3"]]),
    ],
)
def test_of_a_history_what_stands_before_a_truncate_or_a_generation_is_gone(
    ground: Ground, op: str, position: int, generation: int | None, missing: list[list[str]]
) -> None:
    control = pa.table({"_op": [op], "_position": [position], "_ordinal": [0]})
    control = control.append_column("_generation", pa.array([generation], pa.int64()))
    rows = pa.concat_tables([placed(**HISTORIES["append"]), control], promote_options="default")
    assert sorted(ground.kept("append", rows).missing) == missing


def test_a_target_of_a_kind_that_nobody_knows_is_not_passed(ground: Ground) -> None:
    verdict = ground.kept("guesses", typed())
    assert (verdict.equal, verdict.compared) == (False, False)
    assert verdict.reason == "the target has mode 'guesses', which does not identify the current rows"


@pytest.mark.parametrize("mode", [VerifyMode.ROWS, VerifyMode.CHECKSUM])
def test_a_table_is_compared_as_its_rule_changes_it(ground: Ground, mode: VerifyMode) -> None:
    ground.rule(
        "except_column_list: ['yes'], transform: {drop: [doc], rename: {id: nr, big: huge}, mask: {words: redact}}"
    )
    rows = replaced(typed(), "words", ["***", "***", None]).drop_columns(["doc", "yes"])
    rows = rows.rename_columns({"id": "nr", "big": "huge"})
    assert ground.verify(rows, mode=mode).equal
    shutil.rmtree(ground.target)
    verdict = ground.verify(replaced(rows, "words", ["***", None, None]), mode=mode)
    assert (verdict.mode, verdict.differing) == ("rows", [{"key": ["2"], "columns": ["words"]}])
    shutil.rmtree(ground.target)
    reason = ground.verify(rows.drop_columns(["huge"]), mode=mode).reason
    assert reason == "the target does not have these columns: ['big']"


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        ("where: 'id > 1'", "rows are filtered by an expression of Spark SQL, which verify does not evaluate"),
        ("python: 'os.path:join'", "rows pass through 'os.path:join', which can change any column but the key"),
        ("drop: [nothing]", "drop: table 'public.kinds' has no column 'nothing', or the publication does not send it"),
    ],
)
def test_what_cannot_be_compared_is_said_and_never_passed(ground: Ground, transform: str, reason: str) -> None:
    ground.rule(f"transform: {{{transform}}}")
    verdict = ground.verify(typed())
    assert (verdict.equal, verdict.compared, verdict.reason) == (False, False, reason)


def test_columns_that_are_computed_are_named_as_not_compared(ground: Ground) -> None:
    ground.rule("transform: {computed: {twice: 'small * 2'}}")
    verdict = ground.verify(typed().append_column("twice", pa.array([0, 0, 0])))
    assert (verdict.equal, verdict.reason) == (True, "computed columns are not compared: ['twice']")


@pytest.mark.parametrize("mode", [VerifyMode.ROWS, VerifyMode.CHECKSUM])
def test_a_list_is_compared_element_by_element(ground: Ground, mode: VerifyMode) -> None:
    rows = typed()
    place = rows.schema.get_field_index("tags")
    for tags, equal in (([["a", "b c"], [], None], True), ([["a", "b", "c"], [], None], False)):
        shutil.rmtree(ground.target, ignore_errors=True)
        verdict = ground.verify(rows.set_column(place, "tags", pa.array(tags, pa.list_(pa.string()))), mode=mode)
        assert (verdict.mode, verdict.equal) == (mode, equal)
