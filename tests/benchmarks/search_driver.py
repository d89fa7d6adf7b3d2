"""Memory of an apply process that indexes the rows of a log on a search server: the process that a pipeline runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from cdc.config import EngineChoice, SearchSinkDefinition
from tests.benchmarks.scale_run import run_apply_once

ENGINES_OF_APPLY: Final = (EngineChoice.AUTO, EngineChoice.SPARK)
"""By default the process applies the log itself; with `spark.engine: spark` executors do."""


def peak_mib(folder: Path, log: Path, sink: SearchSinkDefinition, engine: EngineChoice) -> float:
    """Return the peak memory of the process and of its JVM, if it has one."""
    definition: dict[str, Any] = {
        "name": "memory",
        "source": {"dsn": "postgresql://nobody@127.0.0.1/none"},
        "tables": [{"match": "shop.*"}],
        "log": {"path": str(log), "compact": {"every": "off"}},
        "sinks": [sink.model_dump(mode="json", exclude_defaults=True) | {"type": "search"}],
        "spark": {"engine": engine.value, "checkpoint": f"{folder}/checkpoint"},
        "catalog": {"url": f"sqlite:///{folder}/catalog.db"},
    }
    path = folder / "memory.yaml"
    path.write_text(json.dumps(definition), encoding="utf-8")  # JSON is YAML
    _, driver = run_apply_once(folder, path)
    return driver.peak_mib
