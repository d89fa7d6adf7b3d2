"""Verification in the demo.

`verify` compares every target with the source. `compare_log` needs no Spark: it compares only the keys in the log with
those in the source.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.command_output import last_envelope
from cdc.demo.processes import last_line, pipelines_command
from cdc.demo.shop_workload import script
from cdc.demo.workspace import Workspace
from cdc.errors import ChildFailed
from cdc.log.reader import LogReader
from cdc.log_row import LOG_SCHEMA, Operation
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.table import TableSchema

VERIFY_SECONDS: Final = 180.0
"""Maximum seconds for a verification on two busy cores, also if it starts Spark."""
_REMOVE_ALL: Final = frozenset({Operation.TRUNCATE.value, Operation.GENERATION.value})

LiveKeys = dict[int, dict[tuple[str | None, ...], int]]


@dataclass(frozen=True, slots=True)
class TableVerification:
    """Verification result of one table."""

    name: str
    """`schema.table`."""
    rows: int
    """Number of rows in the source."""
    equal: bool
    """True if the target in every sink equals the table; without sinks, if the log has the same keys as the table."""


def verify(workspace: Workspace, sinks: Sequence[str] = ()) -> list[TableVerification]:
    """Run `python -m pipelines verify` for the sinks; an empty `sinks` means all sinks.

    Raises ChildFailed if the process prints no result or does not end in time.
    """
    line = pipelines_command(
        "verify", workspace.definition, "--json", *(word for sink in sinks for word in ("--sink", sink))
    )
    with workspace.output("verify").open("wb") as errors:
        try:
            ended = subprocess.run(
                line,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=VERIFY_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise ChildFailed(f"the verification of the demo did not end within {VERIFY_SECONDS:.0f} s") from exc
    verdict = envelope(ended.stdout)
    result = verdict.get("result") or {}
    if not result.get("tables"):
        reason = (verdict.get("error") or {}).get("message") or last_line(workspace.output("verify"))
        raise ChildFailed(
            f"the verification of the demo ended with status {ended.returncode}: {reason}",
            remedy=f"read the output in {workspace.output('verify')}",
        )
    return by_table(result["tables"])


def by_table(verdicts: Iterable[dict[str, Any]]) -> list[TableVerification]:
    """Merge the results of all sinks into one per table; a table is equal only if it is equal in every sink."""
    found: dict[str, TableVerification] = {}
    for verdict in verdicts:
        before = found.get(verdict["topic"])
        rows = max(int(verdict["rows"]), before.rows if before else 0)
        equal = bool(verdict["equal"]) and (before is None or before.equal)
        found[verdict["topic"]] = TableVerification(verdict["topic"], rows, equal)
    return [found[topic] for topic in sorted(found)]


def compare_log(dsn: str, log: LogReader) -> list[TableVerification]:
    """Compare the keys of every published table with the keys in the log; the source must be idle."""
    log.refresh()
    alive = live_keys(log)
    schemas = {schema.topic: (relation, schema) for relation, schema in log.schemas().items()}
    results = []
    with connect(dsn, application_name="cdc demo") as connection:
        for (topic,) in connection.execute(script("published")).fetchall():
            if topic not in schemas:
                results.append(TableVerification(topic, 0, equal=False))
                continue
            relation, schema = schemas[topic]
            rows = connection.execute(_keys_query(schema).encode()).fetchall()
            results.append(
                TableVerification(topic, len(rows), {tuple(row) for row in rows} == set(alive.get(relation, {})))
            )
    return results


def live_keys(log: LogReader) -> LiveKeys:
    """Return the keys that exist at the end of the log: relation → key → position of the key's last write."""
    rows = pa.Table.from_batches(log.rows(Position(0), log.durable or Position(0)), LOG_SCHEMA)
    return fold_live_keys(rows.select(["position", "ordinal", "relation", "op", "key", "payload"]))


def fold_live_keys(rows: pa.Table) -> LiveKeys:
    """Return the keys that exist after these log rows: relation → key → position of the key's last write."""
    alive: LiveKeys = {}
    # the key of a logical message, which has no relation, is not the key of a row
    of_tables = rows.filter(pc.is_valid(rows["relation"]))
    for row in of_tables.sort_by([("position", "ascending"), ("ordinal", "ascending")]).to_pylist():
        keys = alive.setdefault(row["relation"], {})
        if row["op"] in _REMOVE_ALL:
            # a TRUNCATE removes every earlier row; a generation removes rows before its first position
            first = int(row["payload"]) if row["op"] == Operation.GENERATION.value else row["position"] + 1
            alive[row["relation"]] = {key: at for key, at in keys.items() if at >= first}
        elif row["key"] is not None:
            if row["op"] == Operation.DELETE.value:
                keys.pop(tuple(row["key"]), None)
            else:
                keys[tuple(row["key"])] = row["position"]
    return alive


def _keys_query(schema: TableSchema) -> str:
    columns = ", ".join(f"{_quoted(column.name)}::text" for column in schema.key)
    return f"SELECT {columns} FROM {_quoted(schema.schema)}.{_quoted(schema.name)}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def envelope(printed: bytes) -> dict[str, Any]:
    """Return the last envelope that a command printed; an empty one if there is none."""
    return last_envelope(printed.decode(errors="replace")) or {}
