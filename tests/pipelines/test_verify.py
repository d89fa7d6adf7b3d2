"""verify: a real source, a made Delta target, and a stand-in that answers for the apply process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from threading import Event, Thread

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from cdc.catalog import Catalog, ProcessReport
from cdc.config import Definition, load
from cdc.errors import ConfigError, CutNotReached
from cdc.log.append import LogWriter
from cdc.log.layout import CommitInfo, LogIdentity
from cdc.log.segments import SegmentLimits
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.tables import match_tables, read_schema
from cdc.stores.published import Published, TableRecord
from pipelines.verify import Report, TableVerdict, VerifyOptions, verify

TABLE = """
CREATE TABLE public.kinds (id int PRIMARY KEY, small smallint, big bigint, yes boolean, half real,
  whole double precision, price numeric(12,2), free numeric, born date, seen timestamptz, plain timestamp,
  raw bytea, words text, tags text[], doc jsonb, sure uuid, doubled int GENERATED ALWAYS AS (small * 2) STORED)
"""
ROWS = """
INSERT INTO public.kinds VALUES
 (1, 7, 9223372036854775807, true, 0.1, 0.1, 12.5, 1.10, '2026-02-03', '2026-02-03 04:05:06.7+02',
  '2026-02-03 04:05:06', '\\x00ff', 'a', '{a,"b c"}', '{"k": 1}', '00000000-0000-0000-0000-00000000000a'),
 (2, -1, 0, false, 'NaN', '-Infinity', -0.01, 'NaN', '0044-03-15 BC', '0044-03-15 BC', '9999-12-31 23:59:59.999999',
  '', '', '{}', '[]', 'ffffffff-ffff-ffff-ffff-ffffffffffff'),
 (3, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)
"""
BC_DAYS = -735_160
SCHEMA = pa.schema(
    [
        ("id", pa.int32()),
        ("small", pa.int16()),
        ("big", pa.int64()),
        ("yes", pa.bool_()),
        ("half", pa.float32()),
        ("whole", pa.float64()),
        ("price", pa.decimal128(12, 2)),
        ("free", pa.string()),
        ("born", pa.date32()),
        ("seen", pa.timestamp("us", tz="UTC")),
        ("plain", pa.timestamp("us")),
        ("raw", pa.binary()),
        ("words", pa.string()),
        ("tags", pa.string()),
        ("doc", pa.string()),
        ("sure", pa.string()),
        ("_position", pa.int64()),
    ]
)


def typed() -> pa.Table:
    """The rows above as a target would hold them."""
    seen = int(datetime(2026, 2, 3, 2, 5, 6, 700_000, tzinfo=UTC).timestamp() * 1_000_000)
    columns = [
        [1, 2, 3],
        [7, -1, None],
        [2**63 - 1, 0, None],
        [True, False, None],
        [0.1, float("nan"), None],
        [0.1, float("-inf"), None],
        [Decimal("12.50"), Decimal("-0.01"), None],
        ["1.10", "NaN", None],
        pa.array([(date(2026, 2, 3) - date(1970, 1, 1)).days, BC_DAYS, None], pa.int32()).cast(pa.date32()),
        pa.array([seen, BC_DAYS * 86_400_000_000, None], pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        [datetime.fromisoformat("2026-02-03 04:05:06"), datetime.fromisoformat("9999-12-31 23:59:59.999999"), None],
        [b"\x00\xff", b"", None],
        ["a", "", None],
        ['{a,"b c"}', "{}", None],
        ['{"k": 1}', "[]", None],
        ["00000000-0000-0000-0000-00000000000a", "ffffffff-ffff-ffff-ffff-ffffffffffff", None],
        [1, 1, 1],
    ]
    arrays = [c if isinstance(c, pa.Array) else pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


@dataclass
class Ground:
    """A source with one table, an empty log, a catalog, and the folder of the target."""

    definition: Definition
    catalog: Catalog
    target: Path
    dsn: str
    state: str = "streaming"
    released: list[str] = field(default_factory=list)

    def record(self, position: int) -> Published:
        with connect(self.dsn) as conn:
            schemas = [read_schema(conn, oid) for oid, _ in match_tables(conn, ["public.kinds"])]
        tables = {
            schema.relation: TableRecord(
                schema.relation,
                schema.topic,
                str(self.target),
                position,
                0,
                self.state,
                reason=None,
                schema=schema.to_json().decode(),
            )
            for schema in schemas
            if schema is not None
        }
        return Published(position, 0, tables)

    def alive(self) -> None:
        self.catalog.processes.report(ProcessReport(self.definition.name, "apply", 1, "running"))

    @contextmanager
    def apply(self, *, passed: int = 0, before_answer: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Answer cuts as the apply process would: first `passed` refusals, then a record."""
        self.alive()
        done = Event()
        thread = Thread(target=self._answer, args=(done, passed, before_answer))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _answer(self, done: Event, passed: int, before_answer: Callable[[], None]) -> None:
        commands, name = self.catalog.commands, self.definition.name
        while not done.is_set():
            for command in commands.pending(name, "cut"):
                if passed:
                    passed -= 1
                    commands.finish(command.id, {"reason": "passed"}, ok=False)
                    continue
                before_answer()
                record = self.record(command.payload["position"])
                fields = {**asdict(record), "format": 1, "tables": [asdict(t) for t in record.tables.values()]}
                commands.finish(command.id, {"record": fields, "handle": "{}"})
            done.wait(0.02)
        self.released += [c.payload["handle"] for c in commands.pending(name, "release")]

    def verify(self, rows: pa.Table, **options: object) -> TableVerdict:
        write_deltalake(str(self.target), rows)
        with self.apply():
            return self.report(**options).tables[0]

    def report(self, **options: object) -> Report:
        return verify(self.definition, VerifyOptions(timeout=20.0, **options))  # type: ignore[arg-type]


@pytest.fixture
def ground(tmp_path: Path, database: str) -> Iterator[Ground]:
    """Rows at the source; the target is not written yet."""
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        f"name: kinds\nsource: {{dsn: '{database}'}}\ntables: [{{match: 'public.*'}}]\n"
        f"log: {{path: '{tmp_path}/log'}}\n"
        f"sinks: [{{type: delta, name: lake, path: '{tmp_path}/lake/{{schema}}/{{table}}'}}]\n"
    )
    definition = load(path)
    with connect(database) as conn:
        conn.execute(TABLE)
        conn.execute(ROWS)
    identity = LogIdentity(system_id="1", database="kinds")
    writer = LogWriter.open(Path(definition.log.path), identity, SegmentLimits(size=1 << 20, age=60.0))
    writer.commit([], CommitInfo(last=Position(1), committed_at=0, timeline=1))
    with Catalog.open(definition.catalog.url) as catalog:
        yield Ground(definition, catalog, tmp_path / "lake" / "public" / "kinds", database)


def replaced(rows: pa.Table, column: str, values: list[object]) -> pa.Table:
    place = rows.schema.get_field_index(column)
    return rows.set_column(place, rows.schema.field(place), pa.array(values, rows.schema.field(place).type))


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
    assert verdict.reason == "the target lacks columns: ['doc']"


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
    with pytest.raises(CutNotReached, match="has never run"):
        ground.report()


def test_a_sink_that_does_not_answer_is_named_when_the_time_is_over(ground: Ground) -> None:
    ground.alive()
    with pytest.raises(CutNotReached, match="'lake'"):
        verify(ground.definition, VerifyOptions(timeout=0.2))
    assert not ground.catalog.commands.pending("kinds", "cut")


def test_an_unknown_sink_or_table_is_refused(ground: Ground) -> None:
    with pytest.raises(ConfigError, match="unknown sink 'nowhere'"):
        ground.report(sinks=("nowhere",))
    with ground.apply(), pytest.raises(ConfigError, match="no captured table"):
        ground.report(tables=("nothing",))
