"""The new target of a replay: staged targets that replace the old ones, or a separate directory (`--into`).

A staged target is built next to the old target and replaces it in one step. `split_records` decides which tables are
replaced, and which tables of the sink keep their targets.

A separate directory contains a marker file while a replay fills it. After a crash, a second run of the same replay
may empty such a directory; any other directory has to be empty or missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import pyarrow as pa
import pyarrow.fs as pafs

from cdc.config.field_types import fixed_part
from cdc.config.sinks import DefinedSink
from cdc.errors import ConfigError, SinkError
from cdc.targets.published_record import Published, TableRecord, TargetState
from pipelines.sink_kinds import kind_of
from pipelines.sinks.record_after_batch import with_progress_state

UNFINISHED: Final = "_unfinished_replay"
"""Name of the marker file in a directory that a replay is filling; it contains the log id and the name of the sink."""


def split_records(
    wanted: DefinedSink, built: Published, current: Published | None, *, partial: bool
) -> tuple[Published, dict[int, TableRecord]]:
    """Return the record of the tables whose targets are replaced, and the records of all other tables at the same cut.

    built: the record of the new targets. current: the published record of the sink. Raises SinkError if a table would
    be lost: the table could not be built, but the target with its present rows is replaced. partial: whether the
    options limit the replay to some tables.
    """
    good = {r: record for r, record in built.tables.items() if record.state != TargetState.FAILED}
    before = {} if current is None else current.tables
    kind = kind_of(wanted)
    if kind.replaces_all_targets and not partial:
        _check_no_table_lost(built, before, ", or write --into PATH")
        return replace(built, tables=good), {r: built.tables[r] for r in built.tables.keys() - good.keys()}
    replaced = kind.sharing(wanted, good.values(), before)
    _check_no_table_lost(built, replaced, ", or exclude the table from its rule")
    names = {record.topic for record in good.values()}
    succeeded = {r for r, record in before.items() if record.state == TargetState.DROPPED and record.topic in names}
    staying = before.keys() - good.keys() - replaced.keys() - succeeded
    rest = {r: record for r, record in built.tables.items() if r not in good and r not in staying}
    rest |= {r: _at_new_cut(before[r], built) for r in staying}
    return replace(built, tables=good), rest


def _at_new_cut(record: TableRecord, built: Published) -> TableRecord:
    """Return the record of a table whose target the replay does not replace.

    Its position becomes that of the new cut, or stays if the table has failed or could not be built.
    built: the record of the new targets.
    """
    lags = record.relation in built.tables or record.state == TargetState.FAILED
    position = record.position if lags else max(record.position, built.position)
    return with_progress_state(replace(record, position=position), built.position)


def _check_no_table_lost(built: Published, replaced: Mapping[int, TableRecord], alternative: str) -> None:
    for relation, record in built.tables.items():
        before = replaced.get(relation)
        if record.state == TargetState.FAILED and before is not None and before.state != TargetState.FAILED:
            raise SinkError(
                f"the replay did not replace the old target, because the new one would lose table {record.topic!r}: "
                f"{record.reason}",
                remedy=f"correct the cause of this table's failure, then replay again{alternative}",
            )


def absolute_path(path: str) -> str:
    """Make a local path absolute; a URI stays as it is."""
    return path if "://" in path else os.path.abspath(path)  # noqa: PTH100 - Path would fold the slashes of a URI


def check_directory(path: str, owner: str) -> None:
    """Raise ConfigError unless the directory is missing, is empty, or has the marker file of an unfinished replay.

    owner: content of the marker file of this replay.
    """
    system, base = _open_filesystem(path)
    if system.get_file_info(base).type == pafs.FileType.File:
        raise ConfigError(f"--into {path!r} is a file", remedy="name a directory that does not exist yet")
    if _entries(system, base) and _read_owner(system, base) != owner:
        raise ConfigError(
            f"directory --into {path!r} is not empty", remedy="name a directory that does not exist yet or is empty"
        )


@contextmanager
def fill_directory(path: str, owner: str) -> Iterator[None]:
    """Create or empty the directory, and keep a marker file in it until the block ends without an error.

    owner: content of the marker file. Raises ConfigError as check_directory does.
    """
    check_directory(path, owner)
    system, base = _open_filesystem(path)
    system.create_dir(base, recursive=True)
    for entry in _entries(system, base):
        if entry.base_name != UNFINISHED:  # the marker goes last: without it nobody could empty the directory
            (system.delete_dir if entry.type == pafs.FileType.Directory else system.delete_file)(entry.path)
    with system.open_output_stream(f"{base}/{UNFINISHED}") as marker:
        marker.write(owner.encode())
    yield
    system.delete_file(f"{base}/{UNFINISHED}")


def _open_filesystem(path: str) -> tuple[pafs.FileSystem, str]:
    system, base = pafs.FileSystem.from_uri(fixed_part(absolute_path(path)))
    return system, base


def _entries(system: pafs.FileSystem, base: str) -> list[pafs.FileInfo]:
    return list(system.get_file_info(pafs.FileSelector(base, allow_not_found=True)))


def _read_owner(system: pafs.FileSystem, base: str) -> str | None:
    try:
        with system.open_input_stream(f"{base}/{UNFINISHED}") as marker:
            return bytes(marker.read()).decode()
    except (FileNotFoundError, pa.ArrowException):
        return None
