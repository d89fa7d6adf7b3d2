"""Audit of a table's Delta log: every commit after the last checkpoint exists and is readable."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa

from cdc.log.audit.finding import AuditFinding, DamageKind
from cdc.log.layout import commit_file
from cdc.log.object_path import Root
from cdc.log.parquet_check import open_for_random_access
from cdc.log.storage import parquet_file
from cdc.position import Position

_COMMIT: Final = re.compile(r"(\d{20})\.json\Z")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(?:\..*)?\.parquet\Z")
_FOLDER: Final = "_delta_log"
_TORN: Final = "after a loss of power start the reader: it takes back what was never confirmed; else restore the file"
_RESTORE: Final = "restore the file from a backup; only this file records which data files belong to the table"


@dataclass(slots=True)
class Commits:
    """Content of one table's existing commits, and the findings about them."""

    findings: list[AuditFinding] = field(default_factory=list)
    ranges: dict[str, tuple[Position, Position]] = field(default_factory=dict)
    """Data file, relative to the table → (after, upto] of the commit that added it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """One commit."""

    position: int | None
    """Its `txn`."""
    added: Mapping[str, int]
    """Data file → rows."""
    rows: int
    """As its metadata count them, 0 if they do not."""


def look(table: Root, log_id: str) -> Commits:
    """Read every commit and checkpoint of the table at that path; its commits' `txn` has that application id."""
    found = Commits()
    folder = table / _FOLDER
    names = {place.name: place for place in folder.iterdir()}
    versions = sorted(int(match[1]) for name in names if (match := _COMMIT.match(name)))
    whole = [int(match[1]) for name in names if (match := _CHECKPOINT.match(name)) and _reads(names[name])]
    broken = [name for name in names if _CHECKPOINT.match(name) and int(name[:20]) not in whole]
    for name in sorted(broken):
        found.findings.append(_finding(table, name, "the checkpoint cannot be read", _RESTORE))
    for first, last in missing(versions, whole):
        words = "the commit is missing" if first == last else f"this commit and {last - first:,} behind it are missing"
        found.findings.append(_finding(table, commit_file(table, first).name, words, _RESTORE))
    before: int | None = None
    for version in versions:
        try:
            said = parsed(names[commit_file(table, version).name].read_text(encoding="utf-8"), log_id)
        except FileNotFoundError:  # cleaned away since it was listed
            continue
        except (ValueError, KeyError, TypeError, AttributeError):
            remedy = _TORN if version == versions[-1] else _RESTORE
            found.findings.append(_finding(table, f"{version:020d}.json", "the commit cannot be read", remedy))
            before = None
            continue
        found.findings += _faults(table, version, said, before)
        if before is not None and said.position is not None and said.position > before:
            ends = Position(before), Position(said.position)
            found.ranges |= dict.fromkeys(said.added, ends)
        before = said.position if said.position is not None else 0 if version == 0 else before
    return found


def missing(versions: Sequence[int], checkpoints: Collection[int]) -> list[tuple[int, int]]:
    """(first, last) of the commits that a reader needs and that are not there: all behind the last whole checkpoint.

    versions: of the commits that are there, ascending.
    """
    start = max(checkpoints, default=-1)
    held = [start, *(version for version in versions if version > start)]
    return [(before + 1, after - 1) for before, after in pairwise(held) if after - before > 1]


def parsed(text: str, log_id: str) -> CommitRecord:
    """One commit; raises ValueError, KeyError, TypeError or AttributeError for what is none."""
    actions = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not actions:
        raise ValueError("empty")
    told: dict[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    positions = [a["txn"]["version"] for a in actions if "txn" in a and a["txn"]["appId"] == log_id]
    added = (action["add"] for action in actions if "add" in action)
    return CommitRecord(
        position=positions[0] if positions else None,
        added={add["path"]: _count(add) for add in added},
        rows=int(told.get("cdc.rows", 0)),
    )


def _count(add: Mapping[str, Any]) -> int:
    return int(json.loads(add.get("stats") or "{}").get("numRecords", 0))


def _faults(table: Root, version: int, said: CommitRecord, before: int | None) -> Iterator[AuditFinding]:
    name = f"{version:020d}.json"
    if before is not None and said.position is not None and said.position < before:
        text = f"the commit goes back from {Position(before)!s} to {Position(said.position)!s}"
        yield _finding(table, name, text, "find out which other program writes to the table")
    count = sum(said.added.values())
    is_append = before is not None and said.position is not None and said.position > before
    if is_append and said.rows and said.added and said.rows != count:
        yield _finding(table, name, f"the commit speaks of {said.rows:,} rows, its files of {count:,}", _RESTORE)


def _reads(checkpoint: Root) -> bool:
    """Whether it is whole; one that is cleaned away meanwhile counts as such."""
    with suppress(FileNotFoundError):
        try:
            parquet_file(open_for_random_access(checkpoint)).read(use_threads=False)
        except (OSError, pa.ArrowException) as exc:
            return isinstance(exc, FileNotFoundError)
    return True


def _finding(table: Root, name: str, message: str, remedy: str) -> AuditFinding:
    return AuditFinding(damage=DamageKind.COMMIT, file=f"{table.name}/{_FOLDER}/{name}", message=message, remedy=remedy)
