"""Printable form of a definition: with its defaults, and with references instead of secrets."""

from __future__ import annotations

import re
from typing import Any, Final

from cdc.config.definition import Definition
from cdc.config.interpolation import Interpolated
from cdc.config.secret import HIDDEN
from cdc.config.units import print_seconds, print_size

_SENSITIVE: Final = re.compile(r"secret|password|token|access[._]?key|credential", re.IGNORECASE)
"""Names of settings that are hidden: Spark's own rule (`spark.redaction.regex`), extended."""
_URL_PASSWORD: Final = re.compile(r"(://[^:@/]*):[^@/]*@")
_DURATIONS: Final = (("cuts", "retain"), ("upkeep", "every"), ("upkeep", "vacuum_after"))
"""Keys of a sink that are durations."""


def printable_definition(definition: Definition, written: Any) -> dict[str, Any]:
    """Plain values for printing; where a value may contain a password, the text of the file (`written`) is shown."""
    view = definition.model_dump(mode="json")
    source, log, spark = view["source"], view["log"], view["spark"]
    source["heartbeat"] = print_seconds(source["heartbeat"])
    spark["trigger"] = print_seconds(spark["trigger"])
    log["commit"] = {"bytes": print_size(log["commit"]["bytes"]), "linger": print_seconds(log["commit"]["linger"])}
    log["segment"] = {"bytes": print_size(log["segment"]["bytes"]), "every": print_seconds(log["segment"]["every"])}
    log["compact"] = {name: print_seconds(value) for name, value in log["compact"].items()}
    log["retain"] = {name: print_seconds(value) for name, value in log["retain"].items()}
    for sink in view["sinks"]:
        for part, name in _DURATIONS:
            if part in sink:
                sink[part][name] = print_seconds(sink[part][name])
    view["catalog"]["url"] = _hidden_url(view["catalog"]["url"], _at(written, "catalog", "url"))
    spark["conf"] = {
        name: _hidden_setting(name, value, _at(written, "spark", "conf", name)) for name, value in spark["conf"].items()
    }
    return view


def _at(written: Any, *key: str) -> Any:
    for part in key:
        written = written.get(part) if isinstance(written, dict) else None
    return written


def _hidden_url(url: str, written: Any) -> str:
    if isinstance(written, Interpolated) and "@" in url:
        return written.written
    return _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", url)


def _hidden_setting(name: str, value: str, written: Any) -> str:
    if isinstance(written, Interpolated):
        return written.written
    return HIDDEN if _SENSITIVE.search(name) else value
