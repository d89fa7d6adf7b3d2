"""Process logs: structlog in one of two forms, always on standard error."""

from __future__ import annotations

import logging
import os
import sys
from enum import StrEnum
from typing import Final

import structlog

from cdc.remedy import literal


class LogFormat(StrEnum):
    """How a line of the process log looks."""

    #: For people: aligned, coloured on a terminal.
    CONSOLE = "console"
    #: For collectors: one JSON object per line with the stable keys ts, level, event.
    JSON = "json"


REMEDIES: Final = ("fix", "reason")
"""Fields that name commands."""


def configure(form: LogFormat = LogFormat.CONSOLE, level: str = "INFO", *, file: str | None = None) -> None:
    """Set up structlog for this process and let the standard library's loggers speak through it.

    file: the definition, which commands in remedies are to name.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    common: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _Remedies(file),
    ]
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer(ensure_ascii=False)
        if form is LogFormat.JSON
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), timestamp_key="ts")
    )
    structlog.configure(
        processors=[*common, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    lines = logging.StreamHandler(sys.stderr)
    final = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    lines.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=common, processors=final))
    root = logging.getLogger()
    root.handlers[:] = [lines]
    root.setLevel(number)
    # the steps of both are of interest to nobody who did not ask for a migration, or for what Spark is told
    for library in ("alembic", "py4j"):
        logging.getLogger(library).setLevel(max(number, logging.WARNING))


class _Remedies:
    """Writes commands in remedies as they can be copied: with definition, sink and table, where the line has them."""

    def __init__(self, file: str | None) -> None:
        self._file = file

    def __call__(self, _logger: object, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        sink, table = event.get("sink"), event.get("table")
        for name in REMEDIES:
            if isinstance(text := event.get(name), str):
                event[name] = literal(text, sink=sink, topic=table, file=self._file)
        return event


def configure_by_environment(file: str | None = None) -> None:
    """Set up as CDC_LOG_FORMAT says, for a process without the option; what it does not know is for people."""
    known = {form.value: form for form in LogFormat}
    configure(known.get(os.environ.get("CDC_LOG_FORMAT", ""), LogFormat.CONSOLE), file=file)
