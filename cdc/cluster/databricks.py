"""Databricks asset bundle (`databricks.yml`) of the job, for a directory with the definition and the built wheel.

Each variable that the definition refers to comes from a secret of that name; the secret scope has the job's name.
"""

from __future__ import annotations

from typing import Any, Final

from cdc.cluster.job import SparkJob
from cdc.errors import InvalidDefinition

ENTRY_POINT: Final = "cdc-job"
"""Entry point of the wheel, which runs `pipelines.submitted.job`."""
VOLUMES: Final = "/Volumes"
"""Root of the volumes, which every machine of a workspace can access."""


def bundle(job: SparkJob, *, workers: int = 2, schedule: str | None = None) -> dict[str, Any]:
    """The bundle; schedule: Quartz cron expression for a job that ends by itself.

    Raises InvalidDefinition if the definition uses something that the machines lack.
    """
    job.check_portable([VOLUMES], sqlite=False)
    if job.files:
        raise InvalidDefinition(f"secret file {job.files[0]!r} is local: write {{env: VAR}}")
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
    run = {"name": job.job_name, "max_concurrent_runs": 1, **_when(job, schedule), "tasks": [task]}
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


def _when(job: SparkJob, schedule: str | None) -> dict[str, Any]:
    if schedule is not None:
        return {"schedule": {"quartz_cron_expression": schedule, "timezone_id": "UTC"}}
    return {} if job.ends_by_itself else {"continuous": {"pause_status": "UNPAUSED"}}
