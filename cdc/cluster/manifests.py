"""Manifests that run a Spark job: Kubernetes objects for the Spark operator, and a Databricks asset bundle.

On Kubernetes the job is a SparkApplication (`sparkoperator.k8s.io/v1beta2`), and a ConfigMap contains the definition.
Secrets come from a Secret with the name `SparkJob.name`. Its keys are the names of the environment variables and the
base names of the secret files to which the definition refers.

The bundle (`databricks.yml`) is deployed from a directory with the definition and, in `dist/`, the built wheel. Each
environment variable comes from the secret of the same name in the secret scope `SparkJob.name`.

The functions return Python values, which the caller prints as YAML. A text template would have to quote every name and
path itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from cdc.cluster.spark_submit_command import DELTA_PACKAGE, SHIPPED_BY_SPARK, SPARK_VERSION, SparkJob
from cdc.errors import InvalidDefinition

_OPERATOR_API: Final = "sparkoperator.k8s.io/v1beta2"
DEFINITIONS: Final = PurePosixPath("/etc/cdc")
"""Directory in the driver pod with the definition and the secret files whose path in the definition is relative."""
MAIN: Final = "local:///opt/cdc/job.py"
"""Path of `pipelines/submitted/job.py` in the container image; the path does not contain the Python version."""

ENTRY_POINT: Final = "cdc-job"
"""Entry point of the wheel, which runs `pipelines.submitted.job`."""
MEMORY: Final = "2g"
"""Default memory of driver and executors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """Settings of driver and executor pods."""

    image: str
    """Container image with Spark, Java, this product, and the file MAIN."""
    executors: int = 2
    service_account: str = "spark"
    """Service account of the driver, which creates the executors."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """Name of each persistent volume claim that all pods mount → its mount path."""
    schedule: str | None = None
    """Cron schedule, only for a job that `is_bounded`; None to start the job when the manifest is applied."""


def kubernetes_manifest(job: SparkJob, pods: PodSettings) -> list[dict[str, Any]]:
    """Return the Kubernetes objects of the job.

    Raises InvalidDefinition if the definition contains a secret in plain text, or a local path outside the mount paths
    in `pods.claims`.
    """
    job.check_portable(pods.claims.values())
    text = job.config.read_text(encoding="utf-8")
    definition = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": job.name}}
    return [definition | {"data": {job.config.name: text}}, _application(job, pods)]


def databricks_bundle(job: SparkJob, *, workers: int = 2, schedule: str | None = None) -> dict[str, Any]:
    """Return the Databricks asset bundle that runs the job.

    `schedule` is a Quartz cron expression, only for a job that `is_bounded`. Raises InvalidDefinition if the definition
    contains a secret in plain text, a secret file, or a path that is not in an object store. Volumes of Databricks are
    refused too: they make no hard links, with which cdc and delta-rs commit.
    """
    job.check_portable([], sqlite=False)
    if job.files:
        raise InvalidDefinition(
            f"secret file {job.files[0]!r} exists only on this machine, not in Databricks: write {{env: VAR}} instead"
        )
    task = {
        "task_key": job.action.value,
        "python_wheel_task": {
            "package_name": "cdc",
            "entry_point": ENTRY_POINT,
            "parameters": job.arguments(f"${{workspace.file_path}}/{job.config.name}"),
        },
        "libraries": [{"whl": "./dist/*.whl"}],
        "new_cluster": {
            "spark_version": "${var.spark_version}",
            "node_type_id": "${var.node_type_id}",
            "num_workers": workers,
            "spark_conf": job.conf,
            "spark_env_vars": {name: f"{{{{secrets/{job.name}/{name}}}}}" for name in job.variables},
        },
    }
    run = {"name": job.job_name, "max_concurrent_runs": 1, **_trigger(job, schedule), "tasks": [task]}
    return {
        # deploying removes jobs that an earlier bundle of the same name contained, so each title has its own bundle
        "bundle": {"name": job.application_name},
        "variables": {
            "spark_version": {"description": "a runtime with Spark 4.2"},
            "node_type_id": {"description": "node type of the workers"},
        },
        "sync": {"include": [job.config.name]},
        "resources": {"jobs": {job.job_name.replace("-", "_"): run}},
    }


def _application(job: SparkJob, pods: PodSettings) -> dict[str, Any]:
    head = {"apiVersion": _OPERATOR_API, "kind": "SparkApplication", "metadata": {"name": job.job_name}}
    if pods.schedule is None:
        return head | {"spec": _spec(job, pods)}
    # a late run must not overlap with the next one
    spec = {"schedule": pods.schedule, "concurrencyPolicy": "Forbid", "template": _spec(job, pods)}
    return head | {"kind": "ScheduledSparkApplication", "spec": spec}


def _spec(job: SparkJob, pods: PodSettings) -> dict[str, Any]:
    jars, conf = job.definition.spark.delta_jars, job.conf
    fetched = {"packages": [DELTA_PACKAGE], "excludePackages": SHIPPED_BY_SPARK.split(",")}
    secrets = [file for file in job.files if PurePosixPath(file).is_absolute()]
    mounts = [
        {"name": "definition", "mountPath": str(DEFINITIONS)},
        *({"name": "secrets", "mountPath": file, "subPath": PurePosixPath(file).name} for file in secrets),
        *_shared(pods),
    ]
    return {
        "type": "Python",
        "pythonVersion": "3",
        "mode": "cluster",
        "sparkVersion": SPARK_VERSION,
        "image": pods.image,
        "mainApplicationFile": MAIN,
        "arguments": job.arguments(str(DEFINITIONS / job.config.name)),
        "deps": {"jars": [f"local://{jar}" for jar in jars]} if jars else fetched,
        "sparkConf": conf,
        "restartPolicy": {"type": "Never"} if job.is_bounded else {"type": "Always"},
        "volumes": _volumes(job, pods, secrets),
        "driver": {
            "cores": 1,
            "memory": conf.get("spark.driver.memory", MEMORY),
            "serviceAccount": pods.service_account,
            "envSecretKeyRefs": {name: {"name": job.name, "key": name} for name in job.variables},
            "volumeMounts": mounts,
        },
        "executor": {
            "instances": pods.executors,
            "cores": 1,
            "memory": conf.get("spark.executor.memory", MEMORY),
            "volumeMounts": _shared(pods),
        },
    }


def _shared(pods: PodSettings) -> list[dict[str, Any]]:
    return [{"name": claim, "mountPath": path} for claim, path in pods.claims.items()]


def _volumes(job: SparkJob, pods: PodSettings, secrets: list[str]) -> list[dict[str, Any]]:
    sources: list[dict[str, Any]] = [{"configMap": {"name": job.name}}]
    if relative := sorted(set(job.files) - set(secrets)):
        items = [{"key": PurePosixPath(file).name, "path": file} for file in relative]
        sources.append({"secret": {"name": job.name, "items": items}})
    found: list[dict[str, Any]] = [{"name": "definition", "projected": {"sources": sources}}]
    if secrets:
        found.append({"name": "secrets", "secret": {"secretName": job.name}})
    return [*found, *({"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in pods.claims)]


def _trigger(job: SparkJob, schedule: str | None) -> dict[str, Any]:
    if schedule is not None:
        return {"schedule": {"quartz_cron_expression": schedule, "timezone_id": "UTC"}}
    return {} if job.is_bounded else {"continuous": {"pause_status": "UNPAUSED"}}
