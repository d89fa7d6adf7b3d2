"""Index rebuilds: builds a new index of each table that stopped because its mapping cannot take a change.

The apply process does this for search sinks with `schema_changes: rebuild`. A thread reads the published record of such
a sink. For the tables that stopped with CDC-3035 it starts `python -m pipelines replay SINK --tables TABLE` as a child
process: the new index is built from the log next to the old one, without the source, and searches use the old index
until the alias moves. The apply process closes the sink only for the last step, as for every replay.

Nothing has to be remembered across a crash. A table whose rebuild was interrupted is still stopped in the published
record, so the next apply process begins again, and that replay removes what the interrupted one left. A child that
survives its parent keeps the lease of a replay; until it ends, another one is refused and tried again later.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Final, Self

import structlog

from cdc.back_off import BackOff
from cdc.command_output import last_envelope
from cdc.config import Definition, SearchSinkDefinition
from cdc.config.search_sink import IndexChanges
from cdc.config.sinks import searched_sinks
from cdc.errors import CdcError, IndexMappingConflict
from cdc.table import exact_glob
from cdc.targets.published_record import Published, TargetState
from cdc.targets.search_reader import SearchReader, open_search

CHECK_EVERY: Final = 2.0
"""Seconds between two checks whether a table has stopped."""
PAUSES: Final = BackOff(5.0, 600.0)
"""The back-off after a rebuild that failed; a wrong field type in the definition would fail again at once."""
_POLL: Final = 0.2

log = structlog.get_logger("apply")


class IndexRebuilds:
    """The rebuilds of one apply process, one at a time, while the block of the instance runs.

    The end of the block ends a running rebuild; the next apply process begins it again.
    """

    def __init__(self, definition: Definition, config: Path, check_every: float = CHECK_EVERY) -> None:
        """config: the file of the definition, which the child processes read."""
        self._sinks = [sink for sink in searched_sinks(definition.sinks) if _rebuilds(sink)]
        self._config, self._check_every = config, check_every
        self._stopping = Event()
        self._readers: dict[str, SearchReader] = {}
        """Sink → a reader whose connections the checks share."""
        self._failures: dict[str, tuple[int, float]] = {}
        """Sink → number of consecutive failures, and the monotonic time of the next attempt."""
        self._thread = Thread(target=self._run, name="index-rebuilds", daemon=True)

    def __enter__(self) -> Self:
        if self._sinks:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self._check_every):
                for sink in self._sinks:
                    if time.monotonic() >= self._failures.get(sink.name, (0, 0.0))[1]:
                        self._check(sink)
        finally:
            for reader in self._readers.values():
                reader.close()

    def _check(self, sink: SearchSinkDefinition) -> None:
        try:
            reader = self._reader(sink)
        except CdcError:
            return  # the sink itself reports that its server does not answer
        if topics := tables_to_rebuild(reader.published):
            self._rebuild(sink.name, topics)

    def _reader(self, sink: SearchSinkDefinition) -> SearchReader:
        """Return a reader of the present published record of a sink."""
        opened = self._readers.get(sink.name)
        reader = open_search(sink) if opened is None else opened.reopen()
        self._readers[sink.name] = reader
        return reader

    def _rebuild(self, sink: str, topics: Sequence[str]) -> None:
        log.info("building new indexes, because the mapping cannot take a change", sink=sink, tables=list(topics))
        options = [f"--tables={exact_glob(topic)}" for topic in topics]
        command = (sys.executable, "-m", "pipelines", "replay", "-c", str(self._config), "--json", *options, "--", sink)
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as child:
            output = self._output_of(child)
        if self._stopping.is_set():
            return
        if child.returncode == 0:
            self._failures.pop(sink, None)
            log.info("searches use the new indexes", sink=sink, tables=list(topics))
            return
        envelope = last_envelope(output) or {}
        attempts = self._failures.get(sink, (0, 0.0))[0] + 1
        pause = PAUSES.seconds(attempts)
        self._failures[sink] = (attempts, time.monotonic() + pause)
        log.warning(
            "cannot build new indexes; the tables stay stopped until the next attempt",
            sink=sink,
            tables=list(topics),
            status=child.returncode,
            reason=(envelope.get("error") or {}).get("message") or envelope.get("summary"),
            seconds=round(pause),
        )

    def _output_of(self, child: subprocess.Popen[str]) -> str:
        """Wait for a child process and return its output; terminate it if this process stops."""
        while True:
            try:
                return child.communicate(timeout=_POLL)[0]
            except subprocess.TimeoutExpired:
                if self._stopping.is_set():
                    child.terminate()


def tables_to_rebuild(record: Published | None) -> list[str]:
    """Return the topics of the tables that stopped because the mapping of their index cannot take a change."""
    tables = () if record is None else record.tables.values()
    prefix = f"{IndexMappingConflict.code} "
    return sorted(
        table.topic
        for table in tables
        if table.state == TargetState.FAILED and (table.reason or "").startswith(prefix) and table.target
    )


def _rebuilds(sink: SearchSinkDefinition) -> bool:
    return sink.schema_changes is IndexChanges.REBUILD
