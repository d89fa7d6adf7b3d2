"""Submit: the job as a command of spark-submit, on the machine that gives it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cdc.cluster.job import DELTA_PACKAGE, SHIPPED_BY_SPARK, SparkJob


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSubmit:
    """The machine's Spark and Python."""

    home: Path
    """Of Spark."""
    main: Path
    """`pipelines/submitted/job.py`."""
    python: str
    """Of the driver."""
    executor_python: str
    """Of the executors, as it is called there."""

    @property
    def environment(self) -> dict[str, str]:
        """What spark-submit needs: another Spark's SPARK_HOME starts that one, and without any none is found."""
        python = {"PYSPARK_PYTHON": self.executor_python, "PYSPARK_DRIVER_PYTHON": self.python}
        return {"SPARK_HOME": str(self.home)} | python

    def command(self, job: SparkJob, master: str | None = None, extra: Sequence[str] = ()) -> list[str]:
        """The words of it; extra: options that are handed on as they are, and win."""
        jars = job.definition.spark.delta_jars
        delta = {"--jars": ",".join(jars)} if jars else _FETCHED
        options = {"--master": master or job.definition.spark.master, "--name": job.title} | delta
        words = [word for option in options.items() for word in option]
        conf = [word for name, text in job.conf.items() for word in ("--conf", f"{name}={text}")]
        main = [str(self.main), *job.arguments(str(job.config.absolute()))]
        return [str(self.home / "bin" / "spark-submit"), *words, *conf, *extra, *main]

    def line(self, command: Sequence[str]) -> str:
        """The command as a shell takes it, with what it needs of the environment."""
        said = [f"{name}={shlex.quote(text)}" for name, text in self.environment.items()]
        return " ".join([*said, shlex.join(command)])


_FETCHED = {"--packages": DELTA_PACKAGE, "--exclude-packages": SHIPPED_BY_SPARK}
