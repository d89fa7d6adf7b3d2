"""Sinks do not depend on the folder of Spark's checkpoints: they stay exact if it is lost, restored or shared.

Only ranges with many partial images need the streaming query and its checkpoint; `change_documents` makes such a range.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from cdc.demo.shop_workload import Workload
from pipelines.engine_decision import PARTIAL_ROWS
from tests.faults.test_kill_apply import assert_equal
from tests.faults.test_kill_reader import KILLED, prepare
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import PATIENCE

pytestmark = pytest.mark.slow

UPDATES = 50
DOCUMENTS = PARTIAL_ROWS // UPDATES + 100
"""Rows of shop.documents. Updates do not send the unchanged column `body`, which is stored out of line."""


@pytest.fixture(name="shop")
def _shop(pipeline: Pipeline) -> Iterator[tuple[Pipeline, Workload]]:
    prepare(pipeline)
    run_sql(
        pipeline.dsn,
        "CREATE TABLE shop.documents (id int PRIMARY KEY, n int, body text)",
        "ALTER TABLE shop.documents ALTER body SET STORAGE EXTERNAL",
        f"INSERT INTO shop.documents SELECT i, 0, repeat('body ', 500) FROM generate_series(1, {DOCUMENTS}) i",
    )
    pipeline.write(sinks=f"[{{type: delta, name: lake, path: '{pipeline.folder}/lake/{{schema}}/{{table}}'}}]")
    workload = Workload(pipeline.dsn, rate=60.0, seed=11)
    pipeline.reader()
    pipeline.wait_for_copy()
    yield pipeline, workload
    workload.stop()


def change_documents(pipeline: Pipeline) -> None:
    """Commit one transaction that is too large for the driver alone."""
    updates = "UPDATE shop.documents SET n = n + 1;" * UPDATES
    run_sql(pipeline.dsn, f"DO $$ BEGIN {updates} END $$")


def batches(checkpoint: Path, kind: str = "offsets") -> list[str]:
    """What its queries have written down."""
    return sorted(str(file) for file in checkpoint.rglob(f"{kind}/[0-9]*"))


def test_sinks_stay_exact_when_the_checkpoint_is_lost_and_when_an_old_one_is_put_back(
    shop: tuple[Pipeline, Workload],
) -> None:
    pipeline, workload = shop
    checkpoint, copied = pipeline.folder / "checkpoint", pipeline.folder / "copied"
    pipeline.apply()
    workload.start()
    change_documents(pipeline)
    pipeline.wait(lambda: batches(checkpoint), "a batch")
    subprocess.run(["cp", "-r", checkpoint, copied], check=False)  # files go meanwhile
    assert batches(copied)
    shutil.rmtree(checkpoint, ignore_errors=True)
    pipeline.wait_for_more(workload, 60)
    assert_equal(pipeline)
    shutil.copytree(copied, checkpoint, dirs_exist_ok=True)
    pipeline.wait_for_more(workload, 60)
    workload.stop()
    assert_equal(pipeline)


def test_sinks_stay_exact_when_what_spark_wrote_down_is_emptied_and_taken_away(
    shop: tuple[Pipeline, Workload],
) -> None:
    pipeline, workload = shop
    pipeline.apply()
    workload.start()
    for kind in ("offsets", "commits"):
        change_documents(pipeline)
        written = partial(batches, pipeline.folder / "checkpoint", kind)
        pipeline.wait(written, f"{kind} of a batch")
        for file in map(Path, written()):
            with suppress(FileNotFoundError):  # Spark keeps the newest only
                file.write_bytes(b"") if kind == "offsets" else file.unlink()
        pipeline.wait_for_more(workload, 60)
    workload.stop()
    assert_equal(pipeline)


def test_a_driver_killed_around_what_spark_writes_down_of_a_batch_leaves_the_sinks_exact(
    shop: tuple[Pipeline, Workload],
) -> None:
    pipeline, workload = shop
    workload.start()
    for failpoint in ("after_offsets:2", "before_commits:2"):
        change_documents(pipeline)
        assert pipeline.apply(failpoint).wait(PATIENCE * 2) == KILLED, f"{failpoint}\n{pipeline.output()}"
    pipeline.apply()
    pipeline.wait_for_more(workload, 60)
    workload.stop()
    assert_equal(pipeline)


def test_two_drivers_with_one_checkpoint_folder_leave_the_sinks_exact(shop: tuple[Pipeline, Workload]) -> None:
    pipeline, workload = shop
    first = pipeline.apply()
    workload.start()
    change_documents(pipeline)
    pipeline.wait(lambda: pipeline.reports(first), "the first driver is up")
    second = pipeline.apply()
    change_documents(pipeline)
    pipeline.wait_for_more(workload, 600)
    workload.stop()
    assert_equal(pipeline)
    assert second.poll() is None or first.poll() is None, pipeline.output()
