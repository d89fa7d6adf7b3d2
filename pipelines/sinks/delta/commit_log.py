"""Commit log: the `_delta_log` of a Delta table in a directory, with removal of old commits and a test for new ones.

delta-rs looks at every file of it with each commit and each refresh, and reads all since the last checkpoint. A commit
takes 6 ms among a hundred files, 13 among 400, 54 among 5,000 and 840 among 80,000, which a table that changes every
second has after a day. In an object store only what follows the last checkpoint is listed.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from deltalake.exceptions import DeltaError

from cdc import atomic_file
from cdc.failpoint import hit
from cdc.log.checkpoint import HINT, checkpoint_at, version_of
from cdc.log.layout import commit_file

_LOG: Final = "_delta_log"
CHECKPOINTS_AT_ONCE: Final = 20
"""Checkpoints of listed versions that one call creates; each takes some 20 ms."""


def is_newest(uri: str, version: int) -> bool:
    """Whether a table in a directory has no later version; False also where that is not certain.

    A commit that is missing may have been removed as well, which only happens behind a later checkpoint.
    """
    if "://" in uri:
        return False
    table = Path(uri)
    if not commit_file(table, version).exists() or commit_file(table, version + 1).exists():
        return False
    try:
        return bool(json.loads((table / _LOG / HINT).read_bytes())["version"] <= version)
    except FileNotFoundError:
        return True
    except ValueError:  # it is being written
        return False


def remove_old_commits(uri: str, newest: int, listed: Collection[int] = (), *, kept: int) -> int:
    """Remove what no version is read with that is listed or one of the `kept` newest; how many files went.

    None in an object store. A listed version that is older gets a checkpoint of its own and keeps its commit:
    Spark goes by that. Who opens the table meanwhile finds all that the versions behind the newest need.
    """
    if "://" in uri:
        return 0
    table = Path(uri)
    files = sorted((table / _LOG).glob("[0-9]*[a-z]"))
    checkpoints = {version_of(file) for file in files if file.match("*.checkpoint.parquet")}
    begins = max((version for version in checkpoints if version <= newest - kept), default=0)
    stay, made = set[int](), 0
    for version in sorted(version for version in listed if version < begins):
        if version not in checkpoints and made < CHECKPOINTS_AT_ONCE:
            made += 1
            checkpoints |= _alone(table, version)
        first = max((known for known in checkpoints if known <= version), default=0)
        stay.update(range(first, version + 1))
    gone = [file for file in files if version_of(file) < begins and version_of(file) not in stay]
    if gone:  # delta-rs does not wait until it is safe
        atomic_file.sync(table / _LOG / f"{begins:020d}.checkpoint.parquet")
        atomic_file.sync(table / _LOG)
    for file in gone:  # in order, so that what follows a commit that is there is there
        hit("delta_log_shortened")
        file.unlink(missing_ok=True)
    return len(gone)


def _alone(table: Path, version: int) -> set[int]:
    """The version, if it could be given a checkpoint."""
    with suppress(DeltaError):
        checkpoint_at(table, version)
        return {version}
    return set()
