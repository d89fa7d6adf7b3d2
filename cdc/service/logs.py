"""Process logs: structlog in one of two forms, always on standard error."""

from __future__ import annotations

import logging
import os
import sys
from enum import StrEnum

import structlog


class LogFormat(StrEnum):
    """How a line of the process log looks."""

    #: For people: aligned, coloured on a terminal.
    CONSOLE = "console"
    #: For collectors: one JSON object per line with the stable keys ts, level, event.
    JSON = "json"


def configure(form: LogFormat = LogFormat.CONSOLE, level: str = "INFO") -> None:
    """Set up structlog for this process and let the standard library's loggers speak through it."""
    number = logging.getLevelNamesMapping()[level.upper()]
    common: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
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


def configure_by_environment() -> None:
    """Set up as CDC_LOG_FORMAT says, for a process without the option; what it does not know is for people."""
    known = {form.value: form for form in LogFormat}
    configure(known.get(os.environ.get("CDC_LOG_FORMAT", ""), LogFormat.CONSOLE))
