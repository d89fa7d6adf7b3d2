"""A pipeline that a real Prometheus scrapes; each of its parts can be stopped and started alone."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import httpx
from ruamel.yaml import YAML

from cdc import metrics
from cdc.catalog import Catalog, ProcessReport, SinkProgress, TableProgress
from cdc.catalog.verified_ranges import VerifiedRange
from cdc.lsn import Lsn
from cdc.metrics import Metrics
from cdc.postgres.connection import connect
from cdc.postgres.replication import ReplicationStream, StreamOptions
from cdc.service.api.status_sampler import StatusSampler
from cdc.service.log_sampler import LogSampler
from tests.faults.proxy import Proxy
from tests.fixtures.waiting import until
from tests.service.metrics_scrape import write_wal
from tests.service.pipeline import NAME
from tests.service.running import client_of

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "cdc.rules.yml"
SHORTER = {r"\[10m\]": "[8s]", r"> 5e9": "> 30e6"}
"""What a test cannot wait for, and 5 GB of WAL; every other threshold is the shipped one."""
EVERY = "1s"
"""Between two scrapes, and two evaluations."""


def shipped() -> list[dict[str, Any]]:
    """The rules as they are shipped."""
    groups = YAML(typ="safe").load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def shortened() -> list[dict[str, Any]]:
    """The same, each firing as soon as its expression holds."""
    return [{"alert": rule["alert"], "expr": _shorter(rule["expr"])} for rule in shipped()]


def _shorter(expression: str) -> str:
    for long, short in SHORTER.items():
        expression = re.sub(long, short, expression)
    return expression


class Reports(Thread):
    """What reader and apply report twice a second; a test changes the figures."""

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(daemon=True)
        self._catalog, self._over = catalog, Event()
        self.silent = Event()
        self.source_lag, self.sink_lag, self.table_state = 0.02, 0.6, "streaming"
        self.parked = self.blocked = self.reconnects = self.errors = self.lost = 0.0

    def run(self) -> None:
        while not self._over.wait(0.5):
            if not self.silent.is_set():
                self._report()

    def end(self) -> None:
        """Let it report no more."""
        self._over.set()
        self.join()

    def _report(self) -> None:
        reader, apply = Metrics(), Metrics()
        reader.set(metrics.SOURCE_LAG_SECONDS, self.source_lag, NAME)
        reader.set(metrics.LOG_BLOCKED, self.blocked, NAME)
        reader.add(metrics.RECONNECTS, self.reconnects, NAME)
        reader.add(metrics.LOST_TRANSACTIONS, self.lost, NAME)
        reader.add(metrics.ERRORS, self.errors, NAME, "reader", "CDC-2001")
        apply.set(metrics.DLQ_RECORDS, self.parked, NAME, "lake")
        for process, figures in (("reader", reader), ("apply", apply)):
            self._catalog.processes.report(ProcessReport(NAME, process, 1, "running", None, figures.to_json()))
        self._catalog.sinks.record(NAME, SinkProgress("lake", 200, None, self.sink_lag, "running"))
        self._catalog.tables.record(NAME, [TableProgress("lake", "shop.orders", self.table_state, None, 200, 1, 1)])


class Follower(Thread):
    """Streams from a slot and confirms all that there is, as a healthy reader does; it can hang, or be stopped."""

    def __init__(self, dsn: str, slot: str, publication: str) -> None:
        super().__init__(daemon=True)
        self._dsn, self._slot, self._publication = dsn, slot, publication
        self._over, self.hung = Event(), Event()

    def run(self) -> None:
        options = StreamOptions(slot=self._slot, publication=self._publication, start=Lsn(0))
        with ReplicationStream.open(self._dsn, options) as stream, connect(self._dsn) as conn:
            while not self._over.wait(0.05):
                if not self.hung.is_set():
                    stream.receive(0.05)
                    found = conn.execute("SELECT pg_current_wal_lsn()::text").fetchone()
                    stream.confirm(Lsn.parse(found[0] if found else "0/0"))

    def end(self) -> None:
        """Stop streaming."""
        self._over.set()
        self.join()


class Prometheus:
    """A server of its own that scrapes one address; a context manager."""

    def __init__(self, folder: Path, target: int) -> None:
        self._folder = folder
        self._client = client_of("", timeout=10.0)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        YAML().dump({"groups": [{"name": "cdc", "rules": shortened()}]}, folder / "rules.yml")
        YAML().dump(
            {
                "global": {"scrape_interval": EVERY, "evaluation_interval": EVERY, "scrape_timeout": EVERY},
                "rule_files": [str(folder / "rules.yml")],
                "scrape_configs": [{"job_name": "cdc", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
            },
            folder / "prometheus.yml",
        )

    def __enter__(self) -> Self:
        assert PROMETHEUS is not None
        self._child = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={self._folder}/prometheus.yml",
                f"--storage.tsdb.path={self._folder}/tsdb",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self._folder / "prometheus.err").open("wb"),
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._child.terminate()
        self._child.wait()
        self._client.close()

    def firing(self) -> set[str]:
        """Names of the alerts that fire now; raises while it has not started."""
        answer = self._client.get(f"http://127.0.0.1:{self._port}/api/v1/alerts").json()
        return {alert["labels"]["alertname"] for alert in answer["data"]["alerts"] if alert["state"] == "firing"}

    def has_sample(self, metric: str) -> bool:
        """Whether it has a value of a metric: without a first value, a counter does not increase."""
        answer = self._client.get(f"http://127.0.0.1:{self._port}/api/v1/query", params={"query": metric}).json()
        return bool(answer["data"]["result"])

    @property
    def is_up(self) -> bool:
        """Whether it answers."""
        try:
            return self._client.get(f"http://127.0.0.1:{self._port}/-/ready", timeout=1).status_code == 200
        except httpx.HTTPError:
            return False


@dataclass(slots=True)
class Pipeline:
    """All that a situation breaks."""

    catalog: Catalog
    sampler: StatusSampler
    dsn: str
    slot: str
    publication: str
    reports: Reports
    source: Proxy
    """Between the server process and Postgres."""
    server: Proxy
    """Between Prometheus and the server process."""
    folder: Path
    ahead: list[float] = field(default_factory=lambda: [0.0])
    """Seconds by which the clock of the source's watch is ahead."""
    follower: Follower = field(init=False)

    def follow(self) -> None:
        """Have a healthy reader on the slot, a new one if it is gone."""
        with connect(self.dsn) as conn:
            conn.execute(
                "SELECT pg_create_logical_replication_slot(%s, 'pgoutput') WHERE NOT EXISTS "
                "(SELECT FROM pg_replication_slots WHERE slot_name = %s)",
                [self.slot, self.slot],
            )
            inactive = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND NOT active"
            until(lambda: conn.execute(inactive, [self.slot]).fetchone(), "the slot free")
        self.follower = Follower(self.dsn, self.slot, self.publication)
        self.follower.start()

    def end(self) -> None:
        """Leave neither a connection nor a limit behind."""
        self.follower.end()
        self.limit(None)

    def write_wal(self, megabytes: int) -> None:
        """Write so much WAL that concerns no table."""
        with connect(self.dsn) as conn:
            write_wal(conn, megabytes)

    def limit(self, megabytes: int | None) -> None:
        """How much WAL the server keeps for a slot."""
        size = "RESET max_slot_wal_keep_size" if megabytes is None else f"SET max_slot_wal_keep_size = '{megabytes}MB'"
        with connect(self.dsn) as conn:
            conn.execute(f"ALTER SYSTEM {size}".encode())
            conn.execute("SELECT pg_reload_conf()")

    def release(self) -> None:
        """Have the slot keep no more than a few segments, which a checkpoint with a healthy reader brings about."""
        kept = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn) < 20e6 FROM pg_replication_slots"
        with connect(self.dsn) as conn:

            def is_released() -> bool:
                conn.execute("CHECKPOINT")
                conn.execute("SELECT pg_logical_emit_message(false, 'cdc.test', 'x')")
                found = conn.execute(f"{kept} WHERE slot_name = '{self.slot}'".encode()).fetchone()
                return found is not None and bool(found[0])

            until(is_released, "the slot to keep little")

    def verified(self, *, mismatched: int = 0, days_ago: int = 0) -> None:
        """A table was compared with the source."""
        at = datetime.now(UTC) - timedelta(days=days_ago)
        self.catalog.verified.retain(NAME, "lake", [])
        self.catalog.verified.record(
            NAME,
            VerifiedRange(
                sink="lake", topic="shop.orders", began=at, rows=1, mismatched=mismatched, position=1, verified_at=at
            ),
        )

    def look_at(self, root: Path) -> None:
        """Show this log from now on."""
        self.sampler.log = LogSampler(root, every=0.2)


def reported(catalog: Catalog) -> Reports:
    """Reader and apply, reporting."""
    reports = Reports(catalog)
    reports.start()
    return reports
