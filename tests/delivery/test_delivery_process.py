"""The delivery process: standard output in a pipe, a delivery that stopped and is helped, memory, and how it ends."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdc.catalog import Catalog, delivery_requests
from cdc.catalog.dead_letter_requests import DLQ
from cdc.delivery.delivery_process import END_WITHIN
from cdc.delivery.progress import Progress
from cdc.log.consumers import list_consumers
from cdc.log.reader import LogReader
from tests.config.definitions import SOUND
from tests.delivery.sent_log import begin_log, change, schema_version
from tests.fixtures import forked
from tests.fixtures.catalog import put_catalog
from tests.fixtures.waiting import until
from tests.log import simple_compaction
from tests.log.rows import info, table
from tests.log.sample_log import ITEMS, ORDERS, commit_rows, schema_row

ROWS = 150_000
MOST_MEMORY = 350 << 20


class Delivering:
    """A definition with a log, and the processes that send it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "log"
        self.definition = folder / "shop.yaml"
        self.writer = begin_log(self.root)
        self.processes: list[forked.Forked | subprocess.Popen[bytes]] = []
        put_catalog(folder)

    def define(self, *deliveries: dict[str, Any]) -> None:
        """Write the definition."""
        catalog = f"catalog: {{url: 'sqlite:///{self.folder}/catalog.db'}}\n"
        self.definition.write_text(f"{SOUND}{catalog}deliveries: {json.dumps(deliveries)}\n")

    def start(self) -> forked.Forked:
        """Start `cdc deliver`."""
        with (self.folder / "errors").open("ab") as errors:
            process = forked.start("cdc", "deliver", "-c", self.definition, output=errors)
        self.processes.append(process)
        return process

    def start_interpreter(self, *names: str, output: Any = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """The same in an interpreter of its own: a forked process has the memory and standard output of its origin."""
        command = [sys.executable, "-m", "cdc", "deliver", *names, "-c", str(self.definition)]
        with (self.folder / "errors").open("ab") as errors:
            process = subprocess.Popen(command, stdout=output, stderr=errors)
        self.processes.append(process)
        return process

    def errors(self) -> str:
        """What the processes logged."""
        return (self.folder / "errors").read_text()

    def files(self, name: str = "copy") -> list[str]:
        """Ids of the events in the files of a delivery, without the id of the log."""
        files = sorted((self.folder / name).glob("*.jsonl"))
        lines = [line for file in files for line in file.read_bytes().splitlines()]
        return [json.loads(line)["id"].partition("/")[2] for line in lines]

    def position(self, name: str = "copy") -> int:
        """Stored position of a delivery; 0 if there is none."""
        try:
            stored = json.loads((self.folder / name / "progress.json").read_bytes())
        except FileNotFoundError:
            return 0
        return Progress.parse(base64.b64decode(stored["progress"]), name).position

    def catalog(self) -> Catalog:
        """The catalog of the definition."""
        return Catalog.open(f"sqlite:///{self.folder}/catalog.db")


@pytest.fixture(name="delivering")
def _delivering(tmp_path: Path) -> Iterator[Delivering]:
    delivering = Delivering(tmp_path)
    yield delivering
    for process in delivering.processes:
        process.kill()
        process.wait()


def file_delivery(name: str = "copy", **fields: Any) -> dict[str, Any]:
    """A delivery to files."""
    return {"name": name, "type": "file", "path": name, **fields}


def test_a_reader_of_standard_output_that_ends_ends_the_process_without_a_traceback(delivering: Delivering):
    delivering.define({"name": "out", "type": "stdout", "batch": 100})
    for position in range(20, 40):
        commit_rows(delivering.writer, *(change(ORDERS, position, n, str(n)) for n in range(200)))
    sending = delivering.start_interpreter("out", output=subprocess.PIPE)
    assert sending.stdout is not None

    lines = [sending.stdout.readline() for _ in range(5)]
    sending.stdout.close()

    assert [json.loads(line)["id"].rpartition("/")[2] for line in lines] == list("01234")
    assert sending.wait(30) == 1
    assert "Traceback" not in delivering.errors()
    assert "CDC-" not in delivering.errors()


def test_a_process_whose_output_nobody_reads_ends_at_the_second_signal(delivering: Delivering):
    delivering.define({"name": "out", "type": "stdout"})
    commit_rows(delivering.writer, *(change(ORDERS, 20, n, str(n)) for n in range(2_000)))
    sending = delivering.start_interpreter("out", output=subprocess.PIPE)
    assert sending.stdout is not None
    sending.stdout.readline()  # it sends, and the pipe is full soon

    sending.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):  # it waits until the events are taken
        sending.wait(2)
    sending.send_signal(signal.SIGINT)

    assert sending.wait(END_WITHIN / 2) == 0, delivering.errors()


def test_a_sigterm_ends_an_idle_process_at_once_and_its_position_is_registered(delivering: Delivering):
    delivering.define(file_delivery())
    commit_rows(delivering.writer, change(ORDERS, 20, 0, "1"))
    sending = delivering.start()
    until(lambda: delivering.files() == ["0/14/0"], delivering.errors)

    sending.send_signal(signal.SIGTERM)

    assert sending.wait(10) == 0
    assert [one.name for one in list_consumers(delivering.root)] == ["copy"]


def test_a_delivery_that_stopped_continues_after_a_rewind_while_others_run(delivering: Delivering):
    delivering.define(file_delivery(), file_delivery("other"))
    commit_rows(delivering.writer, change(ORDERS, 20, 0, "1"))
    sending = delivering.start()
    until(lambda: delivering.files() == delivering.files("other") == ["0/14/0"], delivering.errors)
    sending.send_signal(signal.SIGTERM)
    assert sending.wait(10) == 0
    for position in (30, 40, 50):
        commit_rows(delivering.writer, change(ORDERS, position, 0, "1"))
    simple_compaction.compact(delivering.root, 40)
    old = [one.segment for one in LogReader(delivering.root).segments()[:-1]]
    delivering.writer.trim(old, LogReader(delivering.root).segments()[-2].last)

    delivering.define(file_delivery(), file_delivery("fresh"))
    delivering.start()
    until(lambda: "CDC-" in delivering.errors(), "the error")
    assert "single changes after 0/14" in delivering.errors()
    until(lambda: delivering.files("fresh") == ["0/28/0", "0/32/0"], delivering.errors)
    with delivering.catalog() as catalog:
        delivery_requests.request_rewind(catalog, "shop", "copy", "0/0", "ada")

    until(lambda: delivering.files() == ["0/14/0", "0/28/0", "0/32/0"], delivering.errors)


def test_a_delivery_with_too_many_dead_letters_continues_when_they_are_discarded(delivering: Delivering):
    delivering.define(file_delivery(stop_at=0, format="debezium"), file_delivery("other"))
    schema = schema_version(ORDERS, "name")
    numbers = replace(schema, columns=tuple(replace(one, type_oid=23, type_name="integer") for one in schema.columns))
    commit_rows(delivering.writer, schema_row(20, 0, numbers), change(ORDERS, 20, 1, "1", after=[(1, "1"), (2, "x")]))
    commit_rows(delivering.writer, change(ORDERS, 30, 0, "2", after=[(1, "2"), (2, "2")]))
    delivering.start()
    with delivering.catalog() as catalog:
        until(
            lambda: catalog.dead_letters.ls("shop") and "may have at most 0" in delivering.errors(), delivering.errors
        )
        (letter,) = catalog.dead_letters.ls("shop")

        catalog.commands.post("shop", DLQ, {"sink": "copy", "verb": "discard", "ids": [letter.id]})

        until(lambda: delivering.files() == ["0/1E/0"], delivering.errors)
        until(lambda: not catalog.dead_letters.ls("shop"), delivering.errors)


def test_a_process_whose_deliveries_have_all_stopped_ends_with_the_error(delivering: Delivering):
    delivering.define(file_delivery())
    (delivering.folder / "copy").mkdir()
    (delivering.folder / "copy" / "progress.json").write_text("?")

    assert delivering.start().wait(30) == 5
    assert "CDC-7012" in delivering.errors()


def test_a_delivery_whose_progress_is_gone_keeps_its_files_and_continues_after_a_rewind(delivering: Delivering):
    delivering.define(file_delivery(), file_delivery("other"))
    commit_rows(delivering.writer, change(ORDERS, 20, 0, "1"))
    sending = delivering.start()
    until(lambda: delivering.files() == delivering.files("other") == ["0/14/0"], delivering.errors)
    sending.send_signal(signal.SIGTERM)
    assert sending.wait(10) == 0
    (delivering.folder / "copy" / "progress.json").unlink()
    commit_rows(delivering.writer, change(ORDERS, 30, 0, "1"))

    delivering.start()
    until(lambda: "CDC-7014" in delivering.errors(), "the error")
    until(lambda: delivering.files("other") == ["0/14/0", "0/1E/0"], delivering.errors)
    assert delivering.files() == ["0/14/0"]
    assert "cdc deliveries rewind copy --to 0/14" in delivering.errors()
    with delivering.catalog() as catalog:
        delivery_requests.request_rewind(catalog, "shop", "copy", "0/14", "ada")

    until(lambda: delivering.files() == ["0/14/0", "0/1E/0"], delivering.errors)


def test_a_masked_value_is_in_no_file_of_log_catalog_or_output(delivering: Delivering):
    rule = {"match": "shop.orders", "transform": {"mask": {"name": "redact"}}}
    delivering.define(file_delivery(rules=[rule], tables=["shop.orders"]))
    image = [(1, "1"), (2, "CANARY")]
    commit_rows(
        delivering.writer,
        change(ORDERS, 20, 0, "1", after=image),
        change(ORDERS, 20, 1, "1", op="u", before=image, after=image),
        change(ORDERS, 20, 2, "1", op="d", before=image, after=None),
    )
    sending = delivering.start()
    until(lambda: len(delivering.files()) == 3, delivering.errors)
    sending.send_signal(signal.SIGTERM)
    assert sending.wait(10) == 0

    kept = [
        file
        for file in delivering.folder.rglob("*")
        if file.is_file() and delivering.root / "changes" not in file.parents
    ]
    assert {file.name for file in kept if b"CANARY" in file.read_bytes()} == set()


def test_a_catalog_that_is_away_stops_no_delivery(delivering: Delivering):
    delivering.define(file_delivery())
    sending = delivering.start()
    until((delivering.folder / "copy" / "progress.json").exists, delivering.errors)
    (delivering.folder / "catalog.db").rename(delivering.folder / "away.db")
    (delivering.folder / "catalog.db").mkdir()

    commit_rows(delivering.writer, change(ORDERS, 20, 0, "1"))

    until(lambda: delivering.files() == ["0/14/0"], delivering.errors)
    assert sending.poll() is None


def test_a_process_waits_for_a_log_that_does_not_exist_yet(tmp_path: Path, delivering: Delivering):
    delivering.define(file_delivery())
    delivering.definition.write_text(delivering.definition.read_text().replace("path: log", "path: later"))
    delivering.start()
    commit_rows(begin_log(tmp_path / "later"), change(ORDERS, 20, 0, "1"))

    until(lambda: delivering.files() == ["0/14/0"], delivering.errors)


def peak_memory(pid: int) -> int:
    """Most resident memory of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def test_a_transaction_of_many_rows_needs_little_memory(delivering: Delivering):
    delivering.define(file_delivery())
    staged = []
    for start in range(0, ROWS, 50_000):
        rows = (
            change((ORDERS, ITEMS)[n % 2], 20, n, str(n), after=[(1, str(n)), (2, "x" * 100)])
            for n in range(start, start + 50_000)
        )
        staged += delivering.writer.stage(table(*rows))
    delivering.writer.commit(staged, info(20))
    sending = delivering.start_interpreter()

    until(lambda: delivering.position() == 20, delivering.errors, seconds=180, every=1)

    assert len(delivering.files()) == ROWS
    assert peak_memory(sending.pid) < MOST_MEMORY
