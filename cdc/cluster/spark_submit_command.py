"""SparkJob: one Spark application of a pipeline, and the command line of spark-submit that runs it.

The command line and the manifests of a job contain references instead of secrets. They omit a Spark setting whose value
comes from an environment variable or whose name is sensitive. The driver reads such a setting from the definition.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from cdc.config import Definition, printable_definition
from cdc.config.field_types import fixed_part, is_remote
from cdc.config.interpolation import Interpolated
from cdc.config.secret import Secret
from cdc.config.sinks import DefinedSink
from cdc.config.units import seconds
from cdc.config.yaml_document import Key, dotted_key
from cdc.errors import ConfigError, InvalidDefinition

SPARK_VERSION: Final = "4.2.0"
"""Version of Spark; pyproject.toml pins it together with the version of Delta."""
DELTA_PACKAGE: Final = "io.delta:delta-spark_4.2_2.13:4.4.0"
"""Maven coordinates of the latest Delta release for SPARK_VERSION."""
SHIPPED_BY_SPARK: Final = (
    "org.apache.hadoop:*,org.apache.parquet:*,org.apache.logging.log4j:*,org.slf4j:*,com.fasterxml.jackson.core:*,"
    "com.github.luben:*,org.xerial.snappy:*,org.roaringbitmap:*,org.locationtech.jts:*,io.airlift:*,io.unitycatalog:*"
)
"""Dependencies of Delta's package that Spark already contains, often in a newer version."""
DEFAULT_CONF: Final = {"spark.log.level": "WARN"}
"""Default Spark settings, which a definition can override; at INFO Spark logs a hundred lines for every batch."""

_FETCHED: Final = {"--packages": DELTA_PACKAGE, "--exclude-packages": SHIPPED_BY_SPARK}
"""Options of spark-submit that make it download Delta."""

ONCE: Final = "once"
"""Trigger of a job that ends after it has applied all changes."""

_VARIABLE: Final = re.compile(r"(?<!\$)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Pattern of a reference `${VAR}` without a default."""
_PASSWORD: Final = re.compile(r"://[^:@/]*:(?!\$\{)[^@/]+@")
"""Pattern of a literal password in a URL."""


class SparkAction(StrEnum):
    """Command of `python -m pipelines` that a job runs."""

    #: Apply the log to the sinks, until stopped.
    APPLY = "apply"
    #: Rebuild the target of one sink from the log.
    REPLAY = "replay"
    #: Compact closed segments of the log.
    COMPACT = "compact"
    #: Read the chunks of copies for the reader.
    COPY = "copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkJob:
    """One Spark application to submit."""

    definition: Definition
    written: Any
    """Content of the definition file before interpolation: with `${VAR}`, not with the value of the variable."""
    config: Path
    """Path of the definition file."""
    sinks: tuple[str, ...] = ()
    """Names of the sinks of the job; empty for all sinks. A replay has exactly one name."""
    action: SparkAction = SparkAction.APPLY
    action_arguments: tuple[str, ...] = ()
    """Command-line arguments of a replay, a compaction or a copy."""
    into: str | None = None
    """Directory of a replay's new target; with None the new target replaces the old one."""
    extra_variables: tuple[str, ...] = ()
    """Names of additional environment variables that the job needs, for access to sinks in an object store."""
    trigger: str | None = None
    """Time between batches, or `once` for a job that ends after it has applied all changes."""

    @property
    def name(self) -> str:
        """Name of the pipeline's objects in the cluster, in the form that Kubernetes accepts, such as `cdc-shop`."""
        return f"cdc-{self.definition.name}".replace("_", "-")

    @property
    def application_name(self) -> str:
        """Name of the Spark application: `cdc-shop` for apply, else with action and sinks: `cdc-shop-replay-lake`."""
        suffix = () if self.action is SparkAction.APPLY else (self.action.value, *self.sinks)
        return "-".join((self.name, *suffix)).replace("_", "-")

    @property
    def job_name(self) -> str:
        """Name of the job in the cluster's list of jobs, such as `cdc-shop-apply` or `cdc-shop-replay-lake`."""
        return f"{self.name}-apply" if self.action is SparkAction.APPLY else self.application_name

    @property
    def is_bounded(self) -> bool:
        """True if the job ends without a request to stop."""
        return self.action is not SparkAction.APPLY or self.trigger == ONCE

    @property
    def conf(self) -> dict[str, str]:
        """Spark settings of the job that are not sensitive: name → value."""
        shown = printable_definition(self.definition, self.written)["spark"]["conf"]
        public = {name: text for name, text in shown.items() if text == self.definition.spark.conf[name]}
        return dict(sorted((DEFAULT_CONF | public).items()))

    def arguments(self, config: str) -> list[str]:
        """Return the command-line arguments of `pipelines/submitted/job.py` for this job.

        config: path of the definition on the driver.
        """
        if self.action is not SparkAction.APPLY:
            return [self.action.value, "--config", config, *self.action_arguments]
        sinks = [word for sink in self.sinks for word in ("--sink", sink)]
        return ["apply", "--config", config, *sinks, *(["--trigger", self.trigger] if self.trigger else [])]

    @property
    def variables(self) -> list[str]:
        """Names of the environment variables that the job requires; variables with a default are left out."""
        written = {name for _, text in _texts(self.written) for name in _VARIABLE.findall(text)}
        return sorted(
            {*self.extra_variables, *written, *(name for kind, name in _references(self.definition) if kind == "env")}
        )

    @property
    def files(self) -> list[str]:
        """Paths of the secret files, as the definition contains them."""
        return sorted({name for kind, name in _references(self.definition) if kind == "file"})

    def check_portable(self, shared: Collection[str], *, sqlite: bool = True) -> None:
        """Raise InvalidDefinition if the definition contains a secret in plain text or a path on this machine only.

        Accepted paths are in an object store or in a directory of `shared`, if there is any.

        shared: local directories that all machines can access. sqlite: True if the catalog may be an SQLite file in one
        of these directories.
        """
        wanted = self.definition
        for key, path in self._places():
            if not is_remote(path) and not _within(fixed_part(path), shared):
                expected = "a directory that all machines can access" if shared else "a path in an object store"
                raise InvalidDefinition(f"{key} is a local directory: expected {expected}")
        kind, _, file = wanted.catalog.url.partition(":///")
        catalog = self.action is not SparkAction.COMPACT  # a compaction needs no catalog: its commit is fenced
        if catalog and kind == "sqlite" and not (sqlite and _within(file, shared)):
            raise InvalidDefinition("catalog.url is a local file: expected a database that all machines can access")
        if with_password := [key for key, text in _texts(self.written) if _PASSWORD.search(text)]:
            raise InvalidDefinition(
                f"{dotted_key(with_password[0])} contains a password in plain text: write ${{VAR}} instead"
            )
        shown = printable_definition(wanted, self.written)["spark"]["conf"]
        if hidden := sorted(name for name, text in shown.items() if text == "***"):
            raise InvalidDefinition(f"spark.conf {hidden[0]!r} contains a secret in plain text: write ${{VAR}} instead")

    def _places(self) -> Iterator[tuple[str, str]]:
        """Yield (description, path) for every directory that the job reads or writes."""
        yield "log.path", self.definition.log.path
        if self.action not in {SparkAction.COMPACT, SparkAction.COPY}:
            sinks = (sink for sink in self.definition.sinks if sink.directory)
            yield from ((f"the path of sink {sink.name!r}", sink.directory) for sink in sinks)
        if self.into is not None:
            yield "--into", self.into


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSubmit:
    """Paths of the local Spark and Python installations, from which the command line of spark-submit is built."""

    home: Path
    """Directory of the Spark installation (SPARK_HOME)."""
    main: Path
    """Path of `pipelines/submitted/job.py`."""
    python: str
    """Python executable of the driver."""
    executor_python: str
    """Name or path of the Python executable on the executors."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of spark-submit.

        SPARK_HOME is among them because an inherited value could select another Spark.
        """
        python = {"PYSPARK_PYTHON": self.executor_python, "PYSPARK_DRIVER_PYTHON": self.python}
        return {"SPARK_HOME": str(self.home)} | python

    def command(self, job: SparkJob, master: str | None = None, extra: Sequence[str] = ()) -> list[str]:
        """Return the command line of spark-submit; options in `extra` override those of the job."""
        jars = job.definition.spark.delta_jars
        delta = {"--jars": ",".join(jars)} if jars else _FETCHED
        options = {"--master": master or job.definition.spark.master, "--name": job.application_name} | delta
        arguments = [part for option in options.items() for part in option]
        conf = [part for name, text in job.conf.items() for part in ("--conf", f"{name}={text}")]
        main = [str(self.main), *job.arguments(str(job.config.absolute()))]
        return [str(self.home / "bin" / "spark-submit"), *arguments, *conf, *extra, *main]

    def line(self, command: Sequence[str]) -> str:
        """Return the command as one line for a shell, with the environment variables in front."""
        variables = [f"{name}={shlex.quote(text)}" for name, text in self.environment.items()]
        return " ".join([*variables, shlex.join(command)])


def chosen_sinks(definition: Definition, wanted: Collection[str]) -> tuple[DefinedSink, ...]:
    """Return the sinks with these names, or all sinks if `wanted` is empty; raises ConfigError for unknown names."""
    known = [sink.name for sink in definition.sinks]
    if unknown := sorted(set(wanted) - set(known)):
        raise ConfigError(
            f"unknown sink {unknown[0]!r}: expected one of {', '.join(known)}", remedy="choose one of these sinks"
        )
    return tuple(sink for sink in definition.sinks if not wanted or sink.name in wanted)


def checked_trigger(text: str | None) -> str | None:
    """Return the text unchanged; raises InvalidDefinition unless it is None, `once` or a duration."""
    if text not in {None, ONCE}:
        try:
            seconds(text)
        except PydanticCustomError as error:
            raise InvalidDefinition(
                f"trigger {text!r}: {error.message()}", remedy="write a duration such as 5s or 100ms, or 'once'"
            ) from None
    return text


def _references(model: BaseModel) -> Iterator[tuple[str, str]]:
    """Yield (`env` or `file`, name) for every secret that the definition writes as `{env: NAME}` or `{file: NAME}`."""
    for _, value in model:
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Secret) and isinstance(one.reference, dict):
                yield from one.reference.items()
            elif isinstance(one, BaseModel):
                yield from _references(one)


def _texts(written: Any, key: Key = ()) -> Iterator[tuple[Key, str]]:
    """Yield (key, text) for every text value in a definition; the text contains `${VAR}` as the file does."""
    if isinstance(written, dict | list):
        for part, value in written.items() if isinstance(written, dict) else enumerate(written):
            yield from _texts(value, (*key, part))
    elif isinstance(written, str):
        yield key, written.written if isinstance(written, Interpolated) else written


def _within(path: str, shared: Collection[str]) -> bool:
    return any(f"{path}/".startswith(f"{folder.rstrip('/')}/") for folder in shared)
