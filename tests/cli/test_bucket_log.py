"""The commands about the log, of one that lies in a bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdc.bucket_files import BucketPath
from cdc.log import consumers
from cdc.log.consumers import Consumer
from cdc.log.disk_format import FORMAT
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.cli.command import run
from tests.fixtures.s3 import KEY, KEY_ID, S3
from tests.log.rows import IDENTITY, LIMITS, info, row, table
from tests.log.sample_log import ORDERS, commit_rows, schema_row, schema_version
from tests.log.simple_compaction import compact

PLACE = "0/20"


@pytest.fixture(name="root")
def _root(s3: S3) -> BucketPath:
    """A table, three transactions of it, the first two of them compacted, and who reads them."""
    root = s3.root()
    writer = LogWriter.open(root, IDENTITY, LIMITS)
    commit_rows(writer, schema_row(5, 0, schema_version(ORDERS, "name")))
    for position in (10, 20, 32):
        writer.commit(writer.stage(table(row(position), row(position, 1))), info(position))
    compact(root, 20)
    consumers.register(root, Consumer("a-1", "lake", Position(20), seen_at=1))
    return root


@pytest.fixture(name="definition")
def _definition(root: BucketPath, s3: S3, tmp_path: Path) -> Path:
    """Names its key by a file beside it."""
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    path = tmp_path / "shop.yaml"
    path.write_text(
        "version: 1\nname: shop\nsource: {dsn: 'host=127.0.0.1 dbname=shop user=cdc'}\ntables: [{match: shop.*}]\n"
        f"log:\n  path: {root}\n  storage: {{endpoint: 'http://127.0.0.1:{s3.port}', allow_http: true, "
        f"region: us-east-1, access_key_id: {KEY_ID}, secret_access_key: {{file: key}}}}\n"
        f"catalog: {{url: 'sqlite:///{tmp_path}/catalog.db'}}\n"
    )
    return path


@pytest.fixture(name="told")
def _told(capsys: pytest.CaptureFixture[str], definition: Path) -> Callable[..., Any]:
    """What a command answers."""

    def told(*command: str) -> Any:
        done = run(capsys, *command, "-c", definition, "--json")
        assert done.status == 0, done.output + done.errors
        assert KEY not in done.output + done.errors
        return done.envelope["result"]

    return told


def test_the_log_and_its_consumers_are_listed_collected_and_followed(told: Callable[..., Any]) -> None:
    listed = told("log", "ls")
    known = told("consumers", "ls")
    swept = told("log", "gc")
    resolved = told("config", "show")

    assert listed["durable"] == PLACE
    assert [line["name"] for line in known["consumers"]] == ["lake"]
    assert swept["files"] == 0
    assert resolved
    assert told("consumers", "forget", "lake")["forgotten"]
    assert told("consumers", "ls")["consumers"] == []


def test_what_it_holds_is_followed_exported_and_verified(told: Callable[..., Any], tmp_path: Path) -> None:
    last = told("tail", "orders", "-n", "2")["changes"]
    since = told("tail", "orders", "--since", "0/14")["changes"]
    lines = told("log", "export", "--from", "0/14", str(tmp_path / "out.jsonl"))
    whole = told("log", "export", "--format", "parquet", str(tmp_path / "out"))
    report = told("log", "verify")

    assert [change["position"] for change in last] == [PLACE, PLACE]
    assert [change["position"] for change in since] == ["0/14", "0/14", PLACE, PLACE]
    assert lines["rows"] == len((tmp_path / "out.jsonl").read_text().splitlines()) == 4
    assert whole["rows"] == 7
    assert report["findings"] == []
    assert report["read"] == report["files"]
    assert [change["op"] for change in told("log", "inspect", PLACE)["changes"]] == ["c", "c"]
    assert told("migrate", "log") == {"before": FORMAT, "after": FORMAT}


@pytest.mark.slow
def test_a_file_that_is_gone_is_found_and_given_up(
    told: Callable[..., Any], root: BucketPath, definition: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = next(file for file in LogReader(root).every_file() if file.first == 20).path
    (root / file.removeprefix(f"{root}/")).unlink()
    found = run(capsys, "log", "verify", "-c", definition, "--json")
    (finding,) = found.envelope["result"]["findings"]
    done = told("log", "drop-file", finding["file"], "--yes")

    assert found.status == 4
    assert (done["way"], done["marked"]) == ("given_up", ["shop.orders"])
    assert [finding["damage"] for finding in told("log", "verify")["findings"]] == ["lost"]
