"""A source table with a column of every type, its rows in a target, and a stand-in for the apply process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from threading import Event, Thread

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from cdc.catalog import Catalog, ProcessReport
from cdc.config import Definition, load_definition
from cdc.postgres.connection import connect
from cdc.postgres.tables import match_tables, read_schema
from cdc.table import TableSchema
from cdc.targets.published_record import Published, TableRecord
from pipelines.verification.compare_table import TableVerdict
from pipelines.verification.verify import VerifyOptions, VerifyReport, verify

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


@dataclass(frozen=True)
class Target:
    """The target of one sink: its rows, what it says that it keeps of the past, and the sink's rule for the table."""

    rows: pa.Table
    keeping: str = ""
    """The history mode; empty: the target says nothing."""
    rule: str = ""
    """As YAML flow text."""

    def write(self, place: str) -> None:
        """Write it, instead of what is there."""
        shutil.rmtree(place, ignore_errors=True)
        if self.keeping:
            said = {"cdc.mode": self.keeping}
            DeltaTable.create(place, self.rows.schema, configuration=said, raise_if_key_not_exists=False)
        write_deltalake(place, self.rows, mode="append")


@dataclass
class VerifiedPipeline:
    """A source with one table, an empty log, a catalog, and sinks that each have a target of the table."""

    catalog: Catalog
    folder: Path
    dsn: str
    state: str = "streaming"
    parked: tuple[tuple[str, ...], ...] = ()
    targets: dict[str, Target] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.definition = self._define()

    def _define(self) -> Definition:
        """Write a definition with the sinks, or with one that has no target yet."""
        path = self.folder / "pipeline.yaml"
        rules = {name: target.rule for name, target in self.targets.items()} or {"lake": ""}
        sinks = ", ".join(
            f"{{type: delta, name: {name}, path: '{self.folder}/{name}/{{schema}}/{{table}}'"
            + (f", rules: [{{match: 'public.kinds', {rule}}}]}}" if rule else "}")
            for name, rule in rules.items()
        )
        path.write_text(
            f"name: kinds\nsource: {{dsn: '{self.dsn}'}}\ntables: [{{match: 'public.*'}}]\n"
            f"log: {{path: '{self.folder}/log'}}\ncatalog: {{url: 'sqlite:///{self.folder}/catalog.db'}}\n"
            f"sinks: [{sinks}]\n"
        )
        return load_definition(path)

    def place(self, sink: str) -> str:
        """Where the target of a sink lies."""
        return str(self.folder / sink / "public" / "kinds")

    @cached_property
    def schema(self) -> TableSchema:
        """Of the table at the source."""
        with connect(self.dsn) as conn:
            (found,) = (read_schema(conn, oid) for oid, _ in match_tables(conn, ["public.kinds"]))
        assert found is not None
        return found

    def record(self, sink: str, position: int) -> Published:
        schema, target = self.schema, self.targets.get(sink)
        version = 0 if target is None or not target.keeping else 1
        table = TableRecord(
            schema.relation,
            schema.topic,
            self.place(sink),
            position,
            version,
            self.state,
            reason=None,
            schema=schema.to_json().decode(),
            parked=self.parked,
        )
        return Published(position, 0, {schema.relation: table})

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
                record = self.record(command.payload["sink"], command.payload["position"])
                fields = {**asdict(record), "format": 1, "tables": [asdict(t) for t in record.tables.values()]}
                commands.finish(command.id, {"record": fields, "handle": "{}"})
            done.wait(0.02)
        self.released += [c.payload["handle"] for c in commands.pending(name, "release")]

    def fill(self, targets: Mapping[str, Target | pa.Table]) -> None:
        """Give the pipeline these targets and no others: by sink, each with the rows of the table or in another way."""
        self.targets = {n: Target(one) if isinstance(one, pa.Table) else one for n, one in targets.items()}
        for name, target in self.targets.items():
            target.write(self.place(name))
        self.definition = self._define()

    def compare(self, **options: object) -> dict[str, TableVerdict]:
        """The verdict over the target of each sink, all at one cut."""
        with self.apply():
            return {verdict.sink: verdict for verdict in self.report(**options).tables}

    def verify(self, rows: pa.Table, **options: object) -> TableVerdict:
        """The verdict over a target with these rows."""
        self.fill({"lake": rows})
        return self.compare(**options)["lake"]

    def report(self, **options: object) -> VerifyReport:
        return verify(self.definition, VerifyOptions(timeout=20.0, **options))  # type: ignore[arg-type]


def replaced(rows: pa.Table, column: str, values: list[object]) -> pa.Table:
    place = rows.schema.get_field_index(column)
    return rows.set_column(place, rows.schema.field(place), pa.array(values, rows.schema.field(place).type))
