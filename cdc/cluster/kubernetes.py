"""Kubernetes manifests: the job as a SparkApplication of the Spark operator (`sparkoperator.k8s.io/v1beta2`).

A ConfigMap contains the definition. Secrets come from a Secret with the name of the job: its keys are the names of the
variables and the base names of the files that the definition refers to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from cdc.cluster.job import DELTA_PACKAGE, SHIPPED_BY_SPARK, SPARK_VERSION, SparkJob

API: Final = "sparkoperator.k8s.io/v1beta2"
DEFINITIONS: Final = PurePosixPath("/etc/cdc")
"""Mount path of the definition and of secret files with a relative path."""
MAIN: Final = "local:///opt/cdc/job.py"
"""Path of `pipelines/submitted/job.py` in the image, independent of the Python version."""

MEMORY: Final = "2g"
"""Default memory of driver and executors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """Settings of driver and executor pods."""

    image: str
    """Container image with Spark, Java, this product, and MAIN."""
    executors: int = 2
    service_account: str = "spark"
    """Service account of the driver, which creates the executors."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """Persistent volume claims that all pods share, and their mount paths."""
    schedule: str | None = None
    """Cron schedule of a job that ends by itself."""


def manifest(job: SparkJob, pods: PodSettings) -> list[dict[str, Any]]:
    """The Kubernetes objects to apply; raises InvalidDefinition if the definition uses something that pods lack."""
    job.check_portable(pods.claims.values())
    text = job.config.read_text(encoding="utf-8")
    definition = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": job.name}}
    return [definition | {"data": {job.config.name: text}}, _application(job, pods)]


def _application(job: SparkJob, pods: PodSettings) -> dict[str, Any]:
    head = {"apiVersion": API, "kind": "SparkApplication", "metadata": {"name": job.job_name}}
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
        "restartPolicy": {"type": "Never"} if job.ends_by_itself else {"type": "Always"},
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
