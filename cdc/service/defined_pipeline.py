"""What the definition of a pipeline has.

The catalog keeps the state of sinks, deliveries and views that were removed from it, and of the pipeline under its
earlier name. `status`, metrics and lists of dead letters show only what is defined.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Self

from cdc.catalog import REPORT_MAX_AGE
from cdc.config.views import NAME_OF_VIEWS

if TYPE_CHECKING:
    from cdc.catalog import Catalog, DeadLetter
    from cdc.config import Definition


@dataclass(frozen=True, slots=True)
class DefinedPipeline:
    """The names in one definition."""

    name: str
    sinks: frozenset[str]
    """Names of sinks and deliveries, and that of the views if there are any."""
    views: frozenset[str]
    """Topics of the views."""
    runs_deliveries: bool
    """Whether `cdc run` starts a process that sends deliveries; those to standard output have a command instead."""
    file: str | None = None
    """The definition file, which commands in remedies name."""

    @classmethod
    def of(cls, definition: Definition, file: str | None = None) -> Self:
        """Return the names in a definition."""
        names = [*(sink.name for sink in definition.sinks), *(one.name for one in definition.deliveries)]
        return cls(
            name=definition.name,
            sinks=frozenset([*names, NAME_OF_VIEWS] if definition.views else names),
            views=frozenset(view.name for view in definition.views),
            runs_deliveries=any(not delivery.is_run_by_hand for delivery in definition.deliveries),
            file=file,
        )

    def has_process(self, process: str) -> bool:
        """Whether a process belongs to the definition."""
        return process != "deliver" or self.runs_deliveries

    def has_table(self, sink: str, topic: str) -> bool:
        """Whether the definition has the sink, and the view if it is one; a table without sink is at the source."""
        return not sink or (sink in self.sinks and (sink != NAME_OF_VIEWS or topic in self.views))

    def dead_letters(self, catalog: Catalog) -> list[DeadLetter]:
        """Return the dead letters of sinks and deliveries of the definition; nobody answers requests to others."""
        return [one for one in catalog.dead_letters.ls(self.name) if one.sink in self.sinks]


def forget_renamed(catalog: Catalog, definition: Definition) -> None:
    """Delete the pipelines of the catalog that had the log of this definition under another name, and do not run."""
    now = datetime.now(UTC)
    for pipeline in catalog.pipelines.ls():
        if pipeline.name == definition.name or _log_path(pipeline.definition) != definition.log.path:
            continue
        reports = catalog.processes.ls(pipeline.name)
        if not any(one.state in {"starting", "running"} and one.age(now) <= REPORT_MAX_AGE for one in reports):
            catalog.pipelines.forget(pipeline.name)


def _log_path(definition: str) -> str | None:
    """Return the path of the log in the JSON text of a definition; None if it has none."""
    log = json.loads(definition).get("log")
    return log.get("path") if isinstance(log, dict) else None
