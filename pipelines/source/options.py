"""Selection: the options of one `cdc` frame, checked where it is made; what they mean is in pipelines/README.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

from cdc.config.storage import Storage, log_root
from cdc.errors import InvalidDefinition, LogTrimmed
from cdc.log import time_index
from cdc.log.reader import LogReader
from cdc.position import Position
from pipelines.types.families import TypePolicy

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

_SET: Final = r"\[!?+\]?+[^\]]*\]"
"""Of characters, in a glob; what it holds is meant as it stands."""
_GLOB: Final = re.compile(rf"(?:{_SET}|[^,])+")
_SPECIAL: Final = re.compile(rf"({_SET})|([\[,\s])")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of one frame."""

    path: str
    storage: str = "{}"
    """How the object store of path is reached, as Storage.to_json has it: no secrets."""
    tables: tuple[str, ...] = ()
    """Globs of `schema.table`; everything when empty. Rows without a table, the messages, pass only then."""
    table: str | None = None
    """The one table of which the frame has typed columns."""
    types: TypePolicy = TypePolicy.EXACT
    """Of these columns."""
    columns: tuple[str, ...] = ()
    """Of the frame, in this order; all when empty."""
    starting: str | datetime = EARLIEST
    """earliest, latest, or a position that the frame begins after; or a moment at or after which it begins."""
    ending: str | datetime = LATEST
    """latest, or a position or moment that the frame ends with. Batch only."""
    max_rows: int | None = None
    history: bool = False
    """Whether every single change is wanted, and of what is older the state alone, as rows that were read."""
    boundaries: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """Read Spark's options; raises InvalidDefinition, MalformedLsn or MalformedPosition."""
        if not options.get("path"):
            raise InvalidDefinition("data source 'cdc' needs option 'path': the root of a change log")
        limit = options.get("maxRowsPerTrigger")
        if limit is not None and not (limit.isdigit() and int(limit)):
            raise InvalidDefinition(f"option 'maxRowsPerTrigger': expected a whole number above 0, got {limit!r}")
        selection = cls(
            path=options["path"],
            storage=options.get("storage", "{}"),
            tables=_names(_GLOB.findall(options.get("tables", ""))),
            table=options.get("table"),
            types=_policy(options.get("types", TypePolicy.EXACT.value)),
            columns=_names(options.get("columns", "").split(",")),
            starting=_bound(options, "starting", EARLIEST),
            ending=_bound(options, "ending", LATEST),
            max_rows=None if limit is None else int(limit),
            history=_flag(options, "history"),
            boundaries=_flag(options, "boundaries"),
        )
        _check_pairs(selection, options)
        return selection

    def opened(self) -> LogReader:
        """The log, as it is now."""
        return LogReader(log_root(self.path, Storage.from_json(self.storage)))

    def start(self, log: LogReader) -> Position:
        """The position that the frame begins after; raises LogTrimmed for a moment before the oldest change."""
        if self.starting == EARLIEST:
            return Position(0)
        # what was committed at the moment itself belongs to the frame
        return _placed(log, self.starting, at_moment=-1)

    def end(self, log: LogReader) -> Position:
        """The last position of a batch frame, never beyond what is durable; raises LogTrimmed as start does."""
        return min(_placed(log, self.ending, at_moment=0), log.durable or Position(0))


def tables_option(globs: Sequence[str]) -> str:
    """The globs as the option `tables` takes them, whatever characters they hold."""
    return ",".join(_SPECIAL.sub(lambda found: found[1] or f"[{found[2]}]", glob) for glob in globs)


def _placed(log: LogReader, bound: str | datetime, at_moment: int) -> Position:
    durable = log.durable or Position(0)
    if bound == LATEST:
        return durable
    if isinstance(bound, str):
        return Position.parse(bound)
    files, micros = log.every_file(), int(bound.timestamp() * 1_000_000)
    first = min((file.first for file in files), default=durable)
    if log.oldest and time_index.position_before(files, durable, micros) < first:
        raise LogTrimmed(
            f"{bound.isoformat()} is before the oldest change in the log: changes up to {log.oldest!s} are trimmed"
        )
    return time_index.position_before(files, durable, micros + at_moment)


def _bound(options: Mapping[str, str], which: str, otherwise: str) -> str | datetime:
    position, moment = f"{which}Position", f"{which}Timestamp"
    if moment not in options:
        text = options.get(position, otherwise)
        if text not in (otherwise, LATEST):
            Position.parse(text)  # told where the frame is made, not in a worker
        return text
    if position in options:
        raise InvalidDefinition(f"options {position!r} and {moment!r} exclude each other: set one of them")
    try:
        found = datetime.fromisoformat(options[moment])
    except ValueError as exc:
        raise InvalidDefinition(
            f"option {moment!r}: expected a time as 2026-01-31T12:00:00Z, got {options[moment]!r}"
        ) from exc
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _flag(options: Mapping[str, str], name: str) -> bool:
    text = options.get(name, "false").lower()
    if text not in ("true", "false"):
        raise InvalidDefinition(f"option {name!r}: expected true or false, got {text!r}")
    return text == "true"


def _policy(text: str) -> TypePolicy:
    try:
        return TypePolicy(text)
    except ValueError as exc:
        raise InvalidDefinition(f"option 'types': expected exact or text, got {text!r}") from exc


def _names(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text.strip() for text in texts if text.strip())


def _check_pairs(selection: SourceOptions, options: Mapping[str, str]) -> None:
    if selection.table is not None and selection.tables:
        raise InvalidDefinition("option 'table' returns the columns of one table: omit option 'tables'")
    if selection.table is None and "types" in options:
        raise InvalidDefinition("option 'types' requires option 'table'")
    if selection.boundaries and (selection.table is not None or selection.columns):
        raise InvalidDefinition("option 'boundaries' adds log rows: omit the options 'table' and 'columns'")
    if "columns" in options and not selection.columns:
        raise InvalidDefinition("option 'columns': expected names of columns, got none")
    if len(set(selection.columns)) < len(selection.columns):
        raise InvalidDefinition("option 'columns' names a column twice")
    for kind in (str, datetime):
        ends = [bound for bound in (selection.starting, selection.ending) if isinstance(bound, kind)]
        placed = [Position.parse(end) if isinstance(end, str) else end for end in ends if end not in (EARLIEST, LATEST)]
        if len(placed) == 2 and placed[0] > placed[1]:  # type: ignore[operator]  # noqa: PLR2004 - of one kind
            raise InvalidDefinition(
                f"options 'starting…' and 'ending…': a frame cannot begin at {ends[0]!s} and end at {ends[1]!s}"
            )
