"""Kubernetes: the job as a SparkApplication of the Spark operator (`sparkoperator.k8s.io/v1beta2`).

Its definition comes as a ConfigMap beside it, secrets from a Secret that is named as the job: of each variable that the
definition refers to a key of that name, of each file its base name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from cdc.cluster.job import DELTA_PACKAGE, SHIPPED_BY_SPARK, SPARK_VERSION, SparkJob

API: Final = "sparkoperator.k8s.io/v1beta2"
DEFINITIONS: Final = PurePosixPath("/etc/cdc")
"""Where a pod finds the definition, and files that it names without a folder."""
MAIN: Final = "local:///opt/cdc/job.py"
"""Where the image has `pipelines/submitted/job.py`: no version of Python is in this path."""

MEMORY: Final = "2g"
"""Of driver and executors, unless spark.conf says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """Where the job is to run."""

    image: str
    """With Spark, Java, this product, and MAIN."""
    executors: int = 2
    service_account: str = "spark"
    """Of the driver: it makes the executors."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """Claims of volumes that all pods share, and where each is mounted."""
    schedule: str | None = None
    """When a job that ends is started, as cron says it."""


def manifest(job: SparkJob, pods: PodSettings) -> list[dict[str, Any]]:
    """The objects to apply; raises InvalidDefinition if the definition names what pods cannot have."""
    job.check_elsewhere(pods.claims.values())
    text = job.config.read_text(encoding="utf-8")
    definition = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": job.name}}
    return [definition | {"data": {job.config.name: text}}, _application(job, pods)]


def _application(job: SparkJob, pods: PodSettings) -> dict[str, Any]:
    head = {"apiVersion": API, "kind": "SparkApplication", "metadata": {"name": job.entry}}
    if pods.schedule is None:
        return head | {"spec": _spec(job, pods)}
    # a run that is late is no reason for a second one beside it
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
        "restartPolicy": {"type": "Never"} if job.once else {"type": "Always"},
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
    if beside := sorted(set(job.files) - set(secrets)):
        items = [{"key": PurePosixPath(file).name, "path": file} for file in beside]
        sources.append({"secret": {"name": job.name, "items": items}})
    found: list[dict[str, Any]] = [{"name": "definition", "projected": {"sources": sources}}]
    if secrets:
        found.append({"name": "secrets", "secret": {"secretName": job.name}})
    return [*found, *({"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in pods.claims)]
