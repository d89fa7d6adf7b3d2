"""The Spark data source `cdc`: ranges of the change log as DataFrames, batch and streaming."""

from __future__ import annotations

from pipelines.source.data_source import CdcDataSource, register, rows_between

__all__ = ["CdcDataSource", "register", "rows_between"]
