"""Job: what a cluster is to do for one pipeline as something to be submitted, and what it needs of where it runs.

Made of the definition alone: the same text from the same one. Secrets stay references. A setting of Spark whose value
comes from a variable, or whose name says that it is secret, is shown nowhere: the job takes it from the definition.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from cdc.config import Definition, printable_definition
from cdc.config.interpolation import Interpolated
from cdc.config.names import fixed_part, is_remote
from cdc.config.secret import Secret
from cdc.config.sinks import Sink
from cdc.config.units import seconds
from cdc.config.yaml_document import Key, dotted_key
from cdc.errors import ConfigError, InvalidDefinition

SPARK_VERSION: Final = "4.2.0"
"""Pinned together with Delta's, as pyproject.toml has them."""
DELTA_PACKAGE: Final = "io.delta:delta-spark_4.2_2.13:4.4.0"
"""The newest Delta that this Spark takes."""
SHIPPED_BY_SPARK: Final = (
    "org.apache.hadoop:*,org.apache.parquet:*,org.apache.logging.log4j:*,org.slf4j:*,com.fasterxml.jackson.core:*,"
    "com.github.luben:*,org.xerial.snappy:*,org.roaringbitmap:*,org.locationtech.jts:*,io.airlift:*,io.unitycatalog:*"
)
"""What Delta's package names as well; Spark has it, often newer."""
DEFAULT_CONF: Final = {"spark.log.level": "WARN"}
"""Else Spark says a hundred lines for every batch."""

ONCE: Final = "once"
"""The trigger of a run that ends."""

_VARIABLE: Final = re.compile(r"(?<!\$)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""One without a default."""
_PASSWORD: Final = re.compile(r"://[^:@/]*:(?!\$\{)[^@/]+@")
"""In a URL, not from a variable."""


class SparkAction(StrEnum):
    """What a job does, as `python -m pipelines` calls it."""

    #: The log to every sink, until stopped.
    APPLY = "apply"
    #: One sink's target built anew from the log.
    REPLAY = "replay"
    #: What is cold of the log to its compacted table.
    COMPACT = "compact"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkJob:
    """One process that is submitted."""

    definition: Definition
    written: Any
    """The values of the file, text with variables as it was written."""
    config: Path
    """The file."""
    sinks: tuple[str, ...] = ()
    """Only these; all if empty. Of a replay the one."""
    verb: SparkAction = SparkAction.APPLY
    words: tuple[str, ...] = ()
    """What another verb than apply is told, as it was written."""
    into: str | None = None
    """Where a replay keeps the new target; else in the place of the old one."""
    more: tuple[str, ...] = ()
    """Variables that it needs as well, those by which a lake in an object store is reached."""
    trigger: str | None = None
    """Time between batches, or `once`: the job ends when it has applied what there was."""

    @property
    def name(self) -> str:
        """As Kubernetes takes it."""
        return f"cdc-{self.definition.name}".replace("_", "-")

    @property
    def title(self) -> str:
        """The name, with what is done where that is not to apply: each replay is something beside the others."""
        said = () if self.verb is SparkAction.APPLY else (self.verb.value, *self.sinks)
        return "-".join((self.name, *said)).replace("_", "-")

    @property
    def entry(self) -> str:
        """The name among the jobs of a cluster."""
        return f"{self.name}-apply" if self.verb is SparkAction.APPLY else self.title

    @property
    def once(self) -> bool:
        """Whether it ends by itself."""
        return self.verb is not SparkAction.APPLY or self.trigger == ONCE

    @property
    def conf(self) -> dict[str, str]:
        """The settings of Spark that may be shown, by name."""
        shown = printable_definition(self.definition, self.written)["spark"]["conf"]
        said = {name: text for name, text in shown.items() if text == self.definition.spark.conf[name]}
        return dict(sorted((DEFAULT_CONF | said).items()))

    def arguments(self, config: str) -> list[str]:
        """What `pipelines/submitted/job.py` is called with; config: where it finds the definition."""
        if self.verb is not SparkAction.APPLY:
            return [self.verb.value, "--config", config, *self.words]
        sinks = [word for sink in self.sinks for word in ("--sink", sink)]
        return ["apply", "--config", config, *sinks, *(["--trigger", self.trigger] if self.trigger else [])]

    @property
    def variables(self) -> list[str]:
        """Names of the variables that it needs, those of the definition that have a default left out."""
        written = {name for _, text in _texts(self.written) for name in _VARIABLE.findall(text)}
        return sorted({*self.more, *written, *(name for kind, name in _references(self.definition) if kind == "env")})

    @property
    def files(self) -> list[str]:
        """Paths of the files that hold its secrets, as the definition names them."""
        return sorted({name for kind, name in _references(self.definition) if kind == "file"})

    def check_elsewhere(self, shared: Collection[str], *, sqlite: bool = True) -> None:
        """Raise InvalidDefinition unless it can be carried out on other machines and its text be shown there.

        shared: directories that all of them have, with an SQLite file as well unless that is ruled out.
        """
        wanted = self.definition
        for key, path in self._places():
            if not is_remote(path) and not _within(fixed_part(path), shared):
                raise InvalidDefinition(f"{key} is a directory of this machine: expected a place that all machines see")
        kind, _, file = wanted.catalog.url.partition(":///")
        catalog = self.verb is not SparkAction.COMPACT  # which asks nobody: its commit is fenced
        if catalog and kind == "sqlite" and not (sqlite and _within(file, shared)):
            raise InvalidDefinition("catalog.url is a file of this machine: expected a database that all machines see")
        if with_password := [key for key, text in _texts(self.written) if _PASSWORD.search(text)]:
            raise InvalidDefinition(f"{dotted_key(with_password[0])} holds a password: write ${{VAR}}")
        shown = printable_definition(wanted, self.written)["spark"]["conf"]
        if hidden := sorted(name for name, text in shown.items() if text == "***"):
            raise InvalidDefinition(f"spark.conf {hidden[0]!r} holds a secret: write ${{VAR}}")

    def _places(self) -> Iterator[tuple[str, str]]:
        """(what it is, path) of all that it reads or writes."""
        yield "log.path", self.definition.log.path
        if self.verb is not SparkAction.COMPACT:
            yield from ((f"the path of sink {sink.name!r}", sink.path) for sink in self.definition.sinks)
        if self.into is not None:
            yield "--into", self.into


def chosen_sinks(definition: Definition, wanted: Collection[str]) -> tuple[Sink, ...]:
    """The sinks of those names, all if there are none; raises ConfigError for a name that is no sink's."""
    known = [sink.name for sink in definition.sinks]
    if unknown := sorted(set(wanted) - set(known)):
        raise ConfigError(
            f"no sink is called {unknown[0]!r}: expected one of {', '.join(known)}", remedy="name one of these"
        )
    return tuple(sink for sink in definition.sinks if not wanted or sink.name in wanted)


def checked_trigger(text: str | None) -> str | None:
    """The text, if it is `once` or a duration; raises InvalidDefinition."""
    if text not in {None, ONCE}:
        try:
            seconds(text)
        except PydanticCustomError as error:
            raise InvalidDefinition(f"trigger {text!r}: {error.message()}", remedy="write 5s, 100ms or once") from None
    return text


def _references(model: BaseModel) -> Iterator[tuple[str, str]]:
    """(env or file, name) of every secret that is not written as text."""
    for _, value in model:
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Secret) and isinstance(one.reference, dict):
                yield from one.reference.items()
            elif isinstance(one, BaseModel):
                yield from _references(one)


def _texts(written: Any, key: Key = ()) -> Iterator[tuple[Key, str]]:
    """Every text of a definition as it was written, and its key."""
    if isinstance(written, dict | list):
        for part, value in written.items() if isinstance(written, dict) else enumerate(written):
            yield from _texts(value, (*key, part))
    elif isinstance(written, str):
        yield key, written.written if isinstance(written, Interpolated) else written


def _within(path: str, shared: Collection[str]) -> bool:
    return any(f"{path}/".startswith(f"{folder.rstrip('/')}/") for folder in shared)
