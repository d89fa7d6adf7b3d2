"""Configuration of log messages: structlog on standard error, for people or as JSON."""

from __future__ import annotations

import logging
import os
import sys
from enum import StrEnum
from typing import Final

import structlog

from cdc.errors import complete_remedy


class LogFormat(StrEnum):
    """Format of log messages."""

    #: Lines for people: aligned columns, coloured on a terminal.
    CONSOLE = "console"
    #: Lines for log collectors: one JSON object per line; the keys ts, level and event never change.
    JSON = "json"


REMEDIES: Final = ("fix", "reason")
"""Fields of a log message that may contain cdc commands."""


def configure(form: LogFormat = LogFormat.CONSOLE, level: str = "INFO", *, file: str | None = None) -> None:
    """Configure structlog for this process, and route the standard library's loggers through it.

    `file` is the path of the definition, which is inserted into commands in remedies.
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
    # alembic logs every step of a migration at INFO, py4j every call to Spark, httpx every request to a search server;
    # botocore logs session tokens at DEBUG
    for library in ("alembic", "py4j", "httpx", "botocore"):
        logging.getLogger(library).setLevel(max(number, logging.WARNING))


class _Remedies:
    """structlog processor that inserts sink, table and definition file into the commands of a log message's remedy."""

    def __init__(self, file: str | None) -> None:
        self._file = file

    def __call__(self, _logger: object, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        sink, table = event.get("sink"), event.get("table")
        for name in REMEDIES:
            if isinstance(text := event.get(name), str):
                event[name] = complete_remedy(text, sink=sink, topic=table, file=self._file)
        return event


def configure_by_environment(file: str | None = None) -> None:
    """Configure log messages from CDC_LOG_FORMAT, for processes without an option for the format.

    An unset or unknown value selects the console format.
    """
    known = {form.value: form for form in LogFormat}
    configure(known.get(os.environ.get("CDC_LOG_FORMAT", ""), LogFormat.CONSOLE), file=file)
