"""Command line of spark-submit for a job."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cdc.cluster.job import DELTA_PACKAGE, SHIPPED_BY_SPARK, SparkJob


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSubmit:
    """Paths of the local Spark and Python installations."""

    home: Path
    """SPARK_HOME."""
    main: Path
    """Path of `pipelines/submitted/job.py`."""
    python: str
    """Python executable of the driver."""
    executor_python: str
    """Python executable of the executors, by its name there."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment of spark-submit; sets SPARK_HOME, because an inherited one could start another Spark."""
        python = {"PYSPARK_PYTHON": self.executor_python, "PYSPARK_DRIVER_PYTHON": self.python}
        return {"SPARK_HOME": str(self.home)} | python

    def command(self, job: SparkJob, master: str | None = None, extra: Sequence[str] = ()) -> list[str]:
        """The arguments of spark-submit; extra: further options, which override those of the job."""
        jars = job.definition.spark.delta_jars
        delta = {"--jars": ",".join(jars)} if jars else _FETCHED
        options = {"--master": master or job.definition.spark.master, "--name": job.application_name} | delta
        arguments = [part for option in options.items() for part in option]
        conf = [part for name, text in job.conf.items() for part in ("--conf", f"{name}={text}")]
        main = [str(self.main), *job.arguments(str(job.config.absolute()))]
        return [str(self.home / "bin" / "spark-submit"), *arguments, *conf, *extra, *main]

    def line(self, command: Sequence[str]) -> str:
        """The command as a shell command line, with its environment variables."""
        said = [f"{name}={shlex.quote(text)}" for name, text in self.environment.items()]
        return " ".join([*said, shlex.join(command)])


_FETCHED = {"--packages": DELTA_PACKAGE, "--exclude-packages": SHIPPED_BY_SPARK}
