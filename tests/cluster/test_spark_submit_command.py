"""SparkJob: names, arguments and variables of a job, and the command line of spark-submit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cdc.cluster.spark_submit_command import ONCE, SparkAction, SparkSubmit, checked_trigger, chosen_sinks
from cdc.config import SearchSinkDefinition
from cdc.errors import ConfigError, InvalidDefinition
from tests.cluster.spark_jobs import spark_job


def test_jobs_of_one_pipeline_have_different_names(tmp_path: Path) -> None:
    apply = spark_job(tmp_path)
    replay = spark_job(tmp_path, action=SparkAction.REPLAY, sinks=("lake",), action_arguments=("lake",))
    assert (apply.application_name, apply.job_name) == ("cdc-shop-eu", "cdc-shop-eu-apply")
    assert (replay.application_name, replay.job_name) == ("cdc-shop-eu-replay-lake", "cdc-shop-eu-replay-lake")
    assert (apply.is_bounded, replay.is_bounded, spark_job(tmp_path, trigger=ONCE).is_bounded) == (
        False, True, True,
    )  # fmt: skip


def test_arguments_name_sinks_and_trigger(tmp_path: Path) -> None:
    job = spark_job(tmp_path, sinks=("lake",), trigger="5s")
    assert job.arguments("c.yaml") == ["apply", "--config", "c.yaml", "--sink", "lake", "--trigger", "5s"]


def test_variables_are_those_of_the_definition_and_the_additional_ones(tmp_path: Path) -> None:
    assert spark_job(tmp_path, extra_variables=("AWS_REGION",)).variables == ["AWS_REGION", "SHOP_DSN"]


def test_a_local_directory_is_not_portable_unless_it_is_shared(tmp_path: Path) -> None:
    job = spark_job(tmp_path)
    job.check_portable(["/mnt/lake"])
    with pytest.raises(InvalidDefinition, match="the path of sink 'find' is a local directory"):
        job.check_portable([])


def test_a_sink_on_a_search_server_has_no_directory_that_machines_would_have_to_share(tmp_path: Path) -> None:
    job = spark_job(tmp_path)
    server = {"engine": "opensearch", "server": {"url": "http://search:9200"}}
    far = SearchSinkDefinition.model_validate({"type": "search", "name": "far", **server})
    lake, _ = job.definition.sinks

    replace(job, definition=job.definition.model_copy(update={"sinks": (lake, far)})).check_portable([])


def test_triggers_and_sinks_are_checked(tmp_path: Path) -> None:
    assert [checked_trigger(text) for text in (None, "once", "5s")] == [None, "once", "5s"]
    with pytest.raises(InvalidDefinition, match="trigger 'soon'"):
        checked_trigger("soon")
    with pytest.raises(ConfigError, match="unknown sink 'pond': expected one of lake, find"):
        chosen_sinks(spark_job(tmp_path).definition, ["pond"])


def test_spark_submit_gets_the_job_after_its_own_options(tmp_path: Path) -> None:
    submit = SparkSubmit(home=Path("/opt/spark"), main=Path("/opt/job.py"), python="py", executor_python="py3")
    command = submit.command(spark_job(tmp_path), "yarn", ["--queue", "night"])
    main = command.index("/opt/job.py")
    assert command[:5] == ["/opt/spark/bin/spark-submit", "--master", "yarn", "--name", "cdc-shop-eu"]
    assert command[main - 2 : main] == ["--queue", "night"]
    assert submit.line(["a b"]) == "SPARK_HOME=/opt/spark PYSPARK_PYTHON=py3 PYSPARK_DRIVER_PYTHON=py 'a b'"
