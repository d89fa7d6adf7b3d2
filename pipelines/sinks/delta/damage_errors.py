"""Errors of a target whose files are damaged: its Delta log, or a data file or deletion vector that the log names.

Such a target stops its table, and only its table; a replay of the table replaces the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
from deltalake.exceptions import CommitFailedError, DeltaError
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from cdc.delta_protocol.deletion_vectors import DamagedVector
from cdc.errors import LogError, SinkUnavailable, TargetDamaged
from pipelines.sinks.delta.indexed.delta_log import DirectoryReplaced
from pipelines.sinks.delta.unsupported_feature_errors import translate_refusals

_DAMAGE: Final = re.compile(
    r"Json error|Parquet error|contiguous commit files|No table metadata or protocol|Invalid Checkpoint"
    r"|No files in log segment|Requested range was invalid|Object at location \S+ not found"
    # Spark
    r"|DELTA_VERSIONS_NOT_CONTIGUOUS|DELTA_STATE_RECOVER_ERROR|DELTA_LOG_FILE_NOT_FOUND|DELTA_MISSING_PART_FILES"
    r"|DELTA_TRUNCATED_TRANSACTION_LOG|FAILED_READ_FILE|FileNotFoundException|is not a Parquet file"
)
"""Texts in errors of delta-rs, Arrow and Spark about damaged or missing files."""
_TRANSIENT: Final = re.compile(
    r"Generic (?:S3|GCS|MicrosoftAzure|HTTP) error|error sending request|timed out|after \d+ retries"
)
"""Texts in errors about an object store that does not answer; another attempt may succeed."""


@contextmanager
def reading(uri: str) -> Iterator[None]:
    """Raise TargetDamaged if files of the target at `uri` cannot be read during the block because they are damaged.

    Raises TargetUnusable if delta-rs or Spark refuses its table features.
    """
    try:
        with translate_refusals(uri):
            yield
    except CommitFailedError:
        raise
    except (DeltaError, pa.ArrowInvalid, Py4JJavaError, PySparkException) as exc:
        text = str(exc)
        if (found := _DAMAGE.search(text)) is None or _TRANSIENT.search(text):
            raise
        cause = text[found.start() :].partition("\n")[0][:300]
        raise TargetDamaged(f"files of target {uri!r} are damaged or missing: {cause}") from exc


@contextmanager
def reading_files(uri: str) -> Iterator[None]:
    """Translate errors of files that the block reads or writes without delta-rs and Spark.

    Raises TargetDamaged or SinkUnavailable.
    """
    try:
        yield
    except (DamagedVector, FileNotFoundError, pa.ArrowInvalid) as exc:
        raise TargetDamaged(f"files of target {uri!r} are damaged or missing: {exc}") from exc
    except (DirectoryReplaced, OSError, LogError) as exc:
        raise SinkUnavailable(f"target {uri!r} cannot be read or written: {exc}") from exc
