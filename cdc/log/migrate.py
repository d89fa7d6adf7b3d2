"""In-place migration of a log to the format of this version.

For each format there is a step that makes true what the next one promises; then one commit per table says so. The
compacted table goes first, for everybody looks at `changes` first. Killed anywhere, each table has the one format or
the other, and the next run goes on: steps may be done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from deltalake.exceptions import CommitFailedError
from deltalake.transaction import CommitProperties, PostCommitHookProperties, Transaction

from cdc.errors import LogError, LogFenced
from cdc.failpoint import hit
from cdc.log.fenced_table import sync_commit
from cdc.log.layout import CHANGES, COMPACTED, FORMAT, LogIdentity, format_of
from cdc.log.object_path import Root
from cdc.log.storage import is_table, last_commit_info, open_table

Step = Callable[[Root], None]
"""What is done to a table at that path before it may call itself of the next format."""
_NO_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


@dataclass(frozen=True, slots=True)
class MigrationResult:
    """What became of a log."""

    before: int
    """The older of its tables' formats."""
    after: int


def migrate_log(root: Root) -> MigrationResult:
    """Bring the log under root to the format of this version, while no reader and no compaction runs.

    One that runs all the same is fenced by its next commit. Raises LogFormatUnknown for a log of a newer format,
    LogFenced if somebody commits meanwhile, LogError if there is no log.
    """
    if not is_table(root / CHANGES):
        raise LogError(f"no change log at {str(root)!r}", remedy="check log.path, and that the reader has run once")
    log_id = str(open_table(root / CHANGES).metadata().id)
    found = []
    for name in (COMPACTED, CHANGES):
        if is_table(root / name):
            found.append(_raised(root / name, log_id))
            hit(f"migrate_{name}")
    return MigrationResult(min(found), FORMAT)


def describe(table: Root, log_id: str, description: str) -> None:
    """Give the table at that path another description in a commit of its writer's kind; durable when it returns.

    Positions stay, and what the latest commit says of itself is said again. Raises LogFenced if somebody else commits.
    """
    delta = open_table(table)
    position = delta.transaction_version(log_id)
    told = {name: str(value) for name, value in last_commit_info(table, delta).items() if name.startswith("cdc.")}
    try:
        delta.alter.set_table_description(
            description,
            commit_properties=CommitProperties(
                custom_metadata=told,
                max_commit_retries=1,
                app_transactions=[] if position is None else [Transaction(log_id, position)],
            ),
            post_commithook_properties=_NO_HOOKS,
        )
    except CommitFailedError as exc:
        raise LogFenced(
            f"another process commits to {table.name!r} of the log",
            remedy="stop the reader and the apply process first",
        ) from exc
    sync_commit(table, open_table(table).version())


def _raised(table: Root, log_id: str) -> int:
    """The format that the table had."""
    description = open_table(table).metadata().description
    found = format_of(description)
    for number in range(found, FORMAT):
        STEPS[number](table)
    if found != FORMAT:
        describe(table, log_id, LogIdentity.from_description(description).to_description())
    return found


def _from_now_on(_table: Root) -> None:
    """Format 2 is about files that are written: those that are there keep their pages without checksums."""


STEPS: Final[Mapping[int, Step]] = {1: _from_now_on}
"""Format → the step to the next one."""
