"""A Spark job of a definition without a file system that machines share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdc.cluster.spark_submit_command import SparkJob
from cdc.config import Definition

WRITTEN: dict[str, Any] = {
    "version": 1,
    "name": "shop_eu",
    "source": {"dsn": {"env": "SHOP_DSN"}},
    "tables": [{"match": "shop.*"}],
    "log": {"path": "s3://lake/log"},
    "sinks": [
        {"name": "lake", "type": "delta", "path": "s3://lake/{schema}/{table}"},
        {"name": "find", "type": "search", "path": "/mnt/lake/find"},
    ],
    "catalog": {"url": "postgresql://c@h/c"},
}


def spark_job(folder: Path, **fields: Any) -> SparkJob:
    """A job of that definition, whose file is in the folder."""
    definition = Definition.model_validate(WRITTEN, context={"environment": {"SHOP_DSN": "postgresql://u:hidden@h/d"}})
    (folder / "shop.yaml").write_text("name: shop_eu")
    return SparkJob(definition=definition, written=WRITTEN, config=folder / "shop.yaml", **fields)
