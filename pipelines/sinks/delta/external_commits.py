"""External commits: rows that other clients changed in a target since the last commit of the sink.

Our commits carry the target's identity, in a `txn` or in the commit info. Of the others, only a commit with files
marked `dataChange` changes rows; an OPTIMIZE, a VACUUM and a property do not. Commits are read only if the target has a
later version than the last commit of the sink. They are read by name, without a listing of the log.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, Final

import pyarrow.fs as pafs
import structlog
from deltalake.fs import DeltaStorageHandler

from cdc.log.layout import commit_file
from pipelines.runtime.progress import ExternalCommit, ExternalCommitReport
from pipelines.sinks.delta.target import APP_ID, DeltaTarget

MISSING: Final = "UNKNOWN"
"""The operation of a commit that is no longer in the log; the log has the last hundred of our commits."""

log = structlog.get_logger("apply")


class ExternalCommitWatch:
    """Finds external commits in a sink's targets; threads may use it at once, for one target one at a time."""

    def __init__(self) -> None:
        self.report = ExternalCommitReport()
        self._known: dict[str, int] = {}
        """By target URI: the version up to which its commits were checked."""

    def before(self, target: DeltaTarget, topic: str, published: int | None) -> None:
        """Check the commits before a batch is merged into a target that was just refreshed.

        published: the last published version of the target; None where that is not known.
        """
        self._known.setdefault(target.uri, target.version if published is None else published)
        self._check(target, topic)

    def after(self, target: DeltaTarget, topic: str) -> None:
        """Check the commits after a batch was merged; a single commit since `before` is its own."""
        if target.version == self._known[target.uri] + 1:
            self._known[target.uri] = target.version
        self._check(target, topic)

    def forget(self) -> None:
        """Forget all versions: the sink closes its targets, and another driver may fill them."""
        self._known.clear()

    def _check(self, target: DeltaTarget, topic: str) -> None:
        known = self._known[target.uri]
        if target.version > known and (found := list(_foreign(target, known))):
            self.report.add(topic, found)
            log.warning(
                "another client changed a target",
                table=topic,
                target=target.uri,
                left_at=known,
                versions=[commit.version for commit in found],
                operations=sorted({commit.operation for commit in found}),
            )
        self._known[target.uri] = target.version


def _foreign(target: DeltaTarget, known: int) -> Iterator[ExternalCommit]:
    store, identity = pafs.PyFileSystem(DeltaStorageHandler(target.uri)), target.identity
    for version in range(known + 1, target.version + 1):
        try:
            with store.open_input_stream(str(commit_file(PurePosixPath(), version))) as commit:
                actions = [json.loads(line) for line in commit.read().splitlines() if line]
        except FileNotFoundError:
            yield ExternalCommit(version, MISSING)
            continue
        if _changes_rows(actions) and not _is_ours(actions, identity):
            operations = (action["commitInfo"].get("operation") for action in actions if "commitInfo" in action)
            yield ExternalCommit(version, str(next(operations, None) or MISSING))


def _changes_rows(actions: Iterable[dict[str, Any]]) -> bool:
    files = (action.get("add") or action.get("remove") for action in actions)
    return any(file.get("dataChange", True) for file in files if file)


def _is_ours(actions: Iterable[dict[str, Any]], identity: str) -> bool:
    """Whether we made the commit, for any table of a shared target and in any step."""
    named = (action.get("txn", {}).get("appId") or action.get("commitInfo", {}).get(APP_ID) for action in actions)
    return any(str(name).startswith(identity) for name in named if name)
