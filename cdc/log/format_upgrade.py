"""Upgrade of a log, in place, to the format that this version of cdc writes.

Each format has a step, which changes a table until it fulfils the guarantees of the next format. Then one commit per
table changes the format number. `changes` is migrated last, because its format number counts as that of the log. A
killed migration leaves each table in the old or in the new format. The next run continues, because every step can be
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from deltalake.exceptions import CommitFailedError
from deltalake.transaction import CommitProperties, PostCommitHookProperties, Transaction

from cdc.bucket_files import Root
from cdc.errors import LogError, LogFenced
from cdc.failpoint import hit
from cdc.log.disk_format import CHANGES, COMPACTED, FORMAT, LogIdentity, format_of
from cdc.log.fenced_table import sync_commit
from cdc.log.table_io import is_table, last_commit_info, open_table, transaction_version

Step = Callable[[Root], None]
"""Function that changes the table at a path until it fulfils the guarantees of the next format."""
_NO_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


@dataclass(frozen=True, slots=True)
class MigrationResult:
    """Format of the log before and after a migration."""

    before: int
    """Lower one of the formats that the two tables had."""
    after: int


def migrate_log(root: Root) -> MigrationResult:
    """Migrate the log under `root` to the format of this version, while no reader and no compaction runs.

    If a reader or a compaction runs nevertheless, its next commit is refused. Raises LogFormatUnknown for a newer log,
    LogFenced if another process commits during the migration, LogError if there is no log.
    """
    if not is_table(root / CHANGES):
        raise LogError(
            f"there is no change log at {str(root)!r}",
            remedy="correct log.path, or start the reader, which creates a log",
        )
    log_id = str(open_table(root / CHANGES).metadata().id)
    found = []
    for name in (COMPACTED, CHANGES):
        if is_table(root / name):
            found.append(_migrate_table(root / name, log_id))
            hit(f"migrate_{name}")
    return MigrationResult(min(found), FORMAT)


def describe(table: Root, log_id: str, description: str) -> None:
    """Replace the description of a Delta table in one commit, which is durable when the function returns.

    The commit repeats the position and the metadata of the latest commit. Raises LogFenced if another process commits.
    """
    delta = open_table(table)
    position = transaction_version(table, delta, log_id)
    metadata = {name: str(value) for name, value in last_commit_info(table, delta).items() if name.startswith("cdc.")}
    try:
        delta.alter.set_table_description(
            description,
            commit_properties=CommitProperties(
                custom_metadata=metadata,
                max_commit_retries=1,
                app_transactions=[] if position is None else [Transaction(log_id, position)],
            ),
            post_commithook_properties=_NO_HOOKS,
        )
    except CommitFailedError as exc:
        raise LogFenced(
            f"the log cannot be migrated: another process commits to its table {table.name!r}",
            remedy="stop the reader and the apply process, then run 'cdc migrate log' again",
        ) from exc
    sync_commit(table, open_table(table).version())


def _migrate_table(table: Root, log_id: str) -> int:
    """Migrate one table, and return the format that the table had before."""
    description = open_table(table).metadata().description
    found = format_of(description)
    for number in range(found, FORMAT):
        STEPS[number](table)
    if found != FORMAT:
        describe(table, log_id, LogIdentity.from_description(description).to_description())
    return found


def _keep_files(_table: Root) -> None:
    """Do nothing, because the next format concerns only new files.

    Files of format 1 stay without page checksums. Messages of format 1 and 2 stay without prefix, kind and LSN.
    """


STEPS: Final[Mapping[int, Step]] = {1: _keep_files, 2: _keep_files}
"""Number of each older format → the step from that format to the next one."""
