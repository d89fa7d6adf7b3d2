"""Manifests: Kubernetes objects and the Databricks bundle of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.cluster.manifests import PodSettings, databricks_bundle, kubernetes_manifest
from cdc.cluster.spark_submit_command import ONCE, SparkAction
from cdc.errors import InvalidDefinition
from tests.cluster.spark_jobs import spark_job

PODS = PodSettings(image="cdc:1", claims={"lake": "/mnt/lake"})


def test_an_application_restarts_and_reads_secrets_by_name(tmp_path: Path) -> None:
    definition, application = kubernetes_manifest(spark_job(tmp_path), PODS)
    spec = application["spec"]
    assert definition["data"] == {"shop.yaml": "name: shop_eu"}
    assert (application["kind"], spec["restartPolicy"]) == ("SparkApplication", {"type": "Always"})
    assert spec["driver"]["envSecretKeyRefs"] == {"SHOP_DSN": {"name": "cdc-shop-eu", "key": "SHOP_DSN"}}
    assert {"name": "lake", "mountPath": "/mnt/lake"} in spec["executor"]["volumeMounts"]


def test_a_schedule_makes_a_scheduled_application(tmp_path: Path) -> None:
    pods = PodSettings(image="cdc:1", claims=PODS.claims, schedule="@daily")
    _, application = kubernetes_manifest(spark_job(tmp_path, trigger=ONCE), pods)
    assert application["kind"] == "ScheduledSparkApplication"
    assert application["spec"]["template"]["restartPolicy"] == {"type": "Never"}


def test_a_sink_in_no_claim_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDefinition, match="the path of sink 'find'"):
        kubernetes_manifest(spark_job(tmp_path), PodSettings(image="cdc:1"))


def test_a_bundle_runs_the_wheel_with_variables_from_the_secret_scope(tmp_path: Path) -> None:
    job = spark_job(tmp_path, action=SparkAction.COMPACT)
    bundle = databricks_bundle(job, workers=3, schedule="0 0 * * * ?")
    run = bundle["resources"]["jobs"]["cdc_shop_eu_compact"]
    (task,) = run["tasks"]
    assert run["schedule"] == {"quartz_cron_expression": "0 0 * * * ?", "timezone_id": "UTC"}
    assert task["python_wheel_task"]["parameters"][0] == "compact"
    assert task["new_cluster"]["num_workers"] == 3
    assert task["new_cluster"]["spark_env_vars"] == {"SHOP_DSN": "{{secrets/cdc-shop-eu/SHOP_DSN}}"}
