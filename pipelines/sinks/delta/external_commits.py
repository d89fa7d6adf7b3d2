"""External commits: finds commits in which other clients changed rows of a target since the last commit of the sink.

A commit of the sink contains the target's id, in a `txn` or in the commit info. Any other commit counts only if it has
files marked `dataChange`, because OPTIMIZE, VACUUM and changes of properties change no row. Commits are read only if
the target has a later version than the last commit of the sink. They are read by name, so `_delta_log` is not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import structlog

from cdc.delta_protocol.actions import Action, decode_commit
from cdc.delta_protocol.commits import commit_path
from cdc.delta_protocol.table_storage import storage_of
from pipelines.runtime.sink_status_reporter import ExternalCommit, ExternalCommitReport
from pipelines.sinks.delta.delta_target import APP_ID, DeltaTarget

MISSING: Final = "UNKNOWN"
"""Operation that is reported for a commit if the commit names none, or if its file was removed from `_delta_log`.
Maintenance keeps about the last hundred commits.
"""

log = structlog.get_logger("apply")


class ExternalCommitWatch:
    """Finds commits of other clients in the targets of a sink.

    Several threads may use an instance at once, but only one thread at a time for each target.
    """

    def __init__(self) -> None:
        self.report = ExternalCommitReport()
        self._known: dict[str, int] = {}
        """Target URI → version up to which the target's commits were checked."""

    def before(self, target: DeltaTarget, topic: str, published: int | None) -> None:
        """Report commits of other clients in a target that was just refreshed, before a batch is merged into it.

        published: the last published version of the target; None if it is unknown.
        """
        self._known.setdefault(target.uri, target.version if published is None else published)
        self._check(target, topic)

    def after(self, target: DeltaTarget, topic: str) -> None:
        """Report commits of other clients after a batch was merged.

        If the target has only one new version since the call of `before`, it is the batch's own commit, and nothing is
        reported.
        """
        if target.version == self._known[target.uri] + 1:
            self._known[target.uri] = target.version
        self._check(target, topic)

    def forget(self) -> None:
        """Forget up to which version each target was checked. Called when the sink is closed, because another driver
        may fill the targets from then on.
        """
        self._known.clear()

    def _check(self, target: DeltaTarget, topic: str) -> None:
        known = self._known[target.uri]
        if target.version > known and (found := list(_foreign(target, known))):
            self.report.add(topic, found)
            log.warning(
                "another client changed rows of a target, which may now differ from the source",
                table=topic,
                target=target.uri,
                last_own_version=known,
                versions=[commit.version for commit in found],
                operations=sorted({commit.operation for commit in found}),
            )
        self._known[target.uri] = target.version


def _foreign(target: DeltaTarget, known: int) -> Iterator[ExternalCommit]:
    storage, identity = storage_of(target.uri), target.identity
    for version in range(known + 1, target.version + 1):
        try:
            actions = decode_commit(storage.read(commit_path(version)))
        except FileNotFoundError:
            yield ExternalCommit(version, MISSING)
            continue
        if _changes_rows(actions) and not _is_ours(actions, identity):
            operations = (action["commitInfo"].get("operation") for action in actions if "commitInfo" in action)
            yield ExternalCommit(version, str(next(operations, None) or MISSING))


def _changes_rows(actions: Iterable[Action]) -> bool:
    files = (action.get("add") or action.get("remove") for action in actions)
    return any(file.get("dataChange", True) for file in files if file)


def _is_ours(actions: Iterable[Action], identity: str) -> bool:
    """Return whether the sink made the commit, for any source table of the target and in any step of a merge."""
    named = (action.get("txn", {}).get("appId") or action.get("commitInfo", {}).get(APP_ID) for action in actions)
    return any(str(name).startswith(identity) for name in named if name)
