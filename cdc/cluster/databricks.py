"""Databricks: the job as an asset bundle (`databricks.yml`), beside the definition and the built wheel.

Each variable that the definition refers to comes from a secret of that name in a scope that is named as the job.
"""

from __future__ import annotations

from typing import Any, Final

from cdc.cluster.job import SparkJob
from cdc.errors import InvalidDefinition

ENTRY_POINT: Final = "cdc-job"
"""Of the wheel: `pipelines.submitted.job`."""
VOLUMES: Final = "/Volumes"
"""Directories that every machine of a workspace sees."""


def bundle(job: SparkJob, *, workers: int = 2, schedule: str | None = None) -> dict[str, Any]:
    """The bundle; schedule: when a job that ends is started, in Quartz' words.

    Raises InvalidDefinition if the definition names what those machines cannot have.
    """
    job.check_elsewhere([VOLUMES], sqlite=False)
    if job.files:
        raise InvalidDefinition(f"secret file {job.files[0]!r} is of this machine: write {{env: VAR}}")
    task = {
        "task_key": job.verb.value,
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
    run = {"name": job.entry, "max_concurrent_runs": 1, **_when(job, schedule), "tasks": [task]}
    return {
        # what a bundle of the same name had before, and has no more, is taken away where it is deployed
        "bundle": {"name": job.title},
        "variables": {
            "spark_version": {"description": "a runtime with Spark 4.2"},
            "node_type_id": {"description": "what a worker is"},
        },
        "sync": {"include": [job.config.name]},
        "resources": {"jobs": {job.entry.replace("-", "_"): run}},
    }


def _when(job: SparkJob, schedule: str | None) -> dict[str, Any]:
    if schedule is not None:
        return {"schedule": {"quartz_cron_expression": schedule, "timezone_id": "UTC"}}
    return {} if job.once else {"continuous": {"pause_status": "UNPAUSED"}}
