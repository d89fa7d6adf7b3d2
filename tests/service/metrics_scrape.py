"""The values in a scrape of `/metrics`, and WAL that changes them."""

from __future__ import annotations

import httpx
import psycopg
from prometheus_client.parser import text_string_to_metric_families


def write_wal(conn: psycopg.Connection, megabytes: int) -> None:
    """So much WAL, in messages that concern no table."""
    for _ in range(megabytes):
        conn.execute("SELECT pg_logical_emit_message(false, 'cdc.test', repeat('x', 1 << 20))")


def metric_values(client: httpx.Client) -> dict[str, float]:
    """Every sample of `/metrics` without labels but the pipeline's."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples if len(sample.labels) == 1}


def health(client: httpx.Client, process: str) -> float | None:
    """`cdc_health` of a process."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = (sample for family in families for sample in family.samples if sample.name == "cdc_health")
    return next((sample.value for sample in found if sample.labels["process"] == process), None)
