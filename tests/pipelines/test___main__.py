"""A run of the apply process that ends: every chosen sink then has all that was durable when it began."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable

from cdc.catalog import Catalog
from cdc.errors import SinkOfAnotherLog
from cdc.position import Position
from pipelines.__main__ import main
from pipelines.engine_decision import PARTIAL_ROWS
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.replay_pause import ReplayPauses
from pipelines.sink_lifecycle import SinkRunner
from pipelines.sink_parts import SinkParts
from pipelines.spark_on_demand import NICE_INCREMENT
from tests.fixtures import forked
from tests.pipelines.shop_pipeline import END, FIGURES, ShopPipeline, applied_shop, change, make_shop, repeated
from tests.pipelines.sinks.added_features import add_features
from tests.pipelines.spark_starts import spark_that_never_starts

PARTIAL = change(END + 100, 0, 1, None, op="u", after=[(1, "1")], partial=True)
"""An update without the values of all columns."""


@pytest.fixture(name="shop")
def _shop(tmp_path: Path) -> ShopPipeline:
    return make_shop(tmp_path / "shop")


@pytest.fixture(name="started")
def _started(tmp_path: Path) -> Path:
    """The file in which a Java that does not start leaves its nice value; its home is the folder of the file."""
    java, started = tmp_path / "bin" / "java", tmp_path / "started"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\nnice > {started}\nexit 1\n")
    java.chmod(0o755)
    return started


def apply_once(shop: ShopPipeline, started: Path, *options: str) -> forked.Ended:
    command = ("pipelines", "apply", "-c", shop.folder / "shop.yaml", "--once", *options)
    return forked.run(*command, environment={"JAVA_HOME": str(started.parent)}, timeout=240)


def test_a_run_of_one_sink_ends_when_that_has_all_of_the_log_and_starts_no_spark(
    shop: ShopPipeline, started: Path
) -> None:
    done = apply_once(shop, started, "--sink", "lake")

    assert done.status == 0, done.output + done.errors
    assert {row["id"]: row["note"] for row in shop.lake()["shop.orders"]}[1] == "newest"
    published = shop.lake_of().published()
    assert published is not None
    assert published.position == END
    assert not (shop.folder / "find").exists()
    assert not started.exists()
    shop.append(END + 100, [PARTIAL])

    done = apply_once(shop, started)

    assert done.status == 0, done.output + done.errors
    assert (shop.folder / "find").exists()
    assert not started.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_a_run_has_spark_write_a_table_that_was_given_features(shop: ShopPipeline) -> None:
    shop.drive("lake", 1_200)
    version = add_features(f"{shop.folder}/lake/shop/orders", ["rowTracking", "domainMetadata"])
    config = shop.folder / "shop.yaml"
    done = forked.run("pipelines", "apply", "-c", config, "--sink", "lake", "--once", timeout=240)

    assert done.status == 0, done.output + done.errors
    assert {row["id"]: row["note"] for row in shop.lake()["shop.orders"]}[1] == "newest"
    tables = shop.lake_of().tables()
    assert {(table.topic, table.state, table.position) for table in tables} == {
        ("shop.items", "streaming", END),
        ("shop.orders", "streaming", END),
    }
    written = DeltaTable(f"{shop.folder}/lake/shop/orders").history()[0]
    assert written["version"] > version
    assert "Spark" in written["engineInfo"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--sink", "lak"), "unknown sink 'lak': expected one of lake, find"),
        (("--trigger", "5"), "trigger '5': expected a duration with its unit"),
    ],
)
def test_what_a_run_cannot_do_is_told_before_anything_starts(
    shop: ShopPipeline, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], says: str
) -> None:
    assert main(["apply", "-c", str(shop.folder / "shop.yaml"), *options]) == 2
    assert says in capsys.readouterr().err


WITHOUT_SPARK = {
    "trigger: 0s": "Spark needs Java, but JAVA_HOME is not set and no 'java' is on the PATH\n  → install",
    "delta_jars: [/no.jar]": "spark.delta_jars is wrong: Delta jar '/no.jar' does not exist\n  → correct spark",
}


@pytest.mark.parametrize(
    ("spark", "trigger"),
    [
        ("trigger: 0s", "0s"),
        ("delta_jars: [/no.jar]", "once"),
        pytest.param("trigger: 0s", "once", marks=pytest.mark.slow),
        pytest.param("delta_jars: [/no.jar]", "0s", marks=pytest.mark.slow),
    ],
)
def test_without_a_spark_that_starts_the_process_ends_and_says_why_once(
    shop: ShopPipeline, spark: str, trigger: str
) -> None:
    config = shop.folder / "shop.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace("trigger: 0s", spark), encoding="utf-8")
    bare = {"JAVA_HOME": "", "PATH": str(shop.folder / "nothing")}
    done = forked.run("pipelines", "apply", "-c", config, "--trigger", trigger, environment=bare, timeout=240)

    assert done.status == 3, done.output + done.errors
    assert done.errors.count(f"✗ CDC-3018 {WITHOUT_SPARK[spark]}") == 1, done.errors
    assert "Traceback" not in done.output + done.errors


def test_spark_starts_for_a_range_that_needs_it_with_a_lower_priority(shop: ShopPipeline, started: Path) -> None:
    shop.append(END + 100, repeated(PARTIAL, PARTIAL_ROWS + 1))
    done = apply_once(shop, started)

    assert done.status == 3, done.output + done.errors
    assert int(started.read_text()) == min(19, os.nice(0) + NICE_INCREMENT)
    assert "✗ CDC-3018 Spark does not start" in done.errors


@pytest.mark.slow
def test_a_stop_while_spark_starts_is_a_stop_also_when_it_ends_spark(shop: ShopPipeline) -> None:
    command = [sys.executable, "-m", "pipelines", "apply", "-c", str(shop.folder / "shop.yaml")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stderr is not None
        said = process.stderr.readline()  # of the JVM, which is there then and its session not yet
        os.killpg(process.pid, signal.SIGTERM)
        said += process.stderr.read()

    assert process.returncode == 0, said
    assert "Traceback" not in said


def test_a_sink_that_cannot_go_on_is_given_up_and_one_that_may_is_not(shop: ShopPipeline) -> None:
    other = applied_shop()
    mine = shop.definition.sinks[0].model_copy(update={"path": other.definition.sinks[0].path})
    with Catalog.open(shop.definition.catalog.url) as catalog:
        parts = SinkParts(
            CutRequests(catalog, "shop"), ReplayPauses(catalog, "shop"), FIGURES, spark_that_never_starts()
        )
        belongs, free = (SinkRunner(shop.definition, sink, parts) for sink in (mine, shop.definition.sinks[1]))
        for query in (belongs, free):
            query.step()

    assert isinstance(belongs.final_error, SinkOfAnotherLog)
    assert belongs.has_applied(Position(END))
    assert free.final_error is None
    assert free.has_applied(Position(1))
    assert not free.has_applied(Position(END + 1))
