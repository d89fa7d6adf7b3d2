"""The inputs of views on the driver: versions of their targets, and the rows that changed between two of them."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from cdc.log.computed_views import InputVersion
from pipelines.sinks.delta.followed_target import FollowedTarget
from pipelines.sinks.delta.table_version import RowsNotReadable, TableVersion
from pipelines.views.needed_rows import ChangedRows


def opened(version: InputVersion) -> TableVersion:
    """Open a version of an input. Raises RowsNotReadable."""
    return TableVersion(version.target, version.version, version.relation)


class FollowedInputs:
    """The targets that views read, followed from step to step."""

    def __init__(self) -> None:
        self._targets: dict[str, FollowedTarget] = {}
        self._changed: dict[tuple[InputVersion, int], ChangedRows] = {}
        """Version before, and number of the version after → the changed rows, which several views of a step need."""

    def changed_rows(self, before: InputVersion, after: TableVersion, keys: pa.Table) -> ChangedRows:
        """Return the rows with some keys as they were and as they are; rows that did not change may be left out.

        keys: those that may have changed between the versions, the same ones until `keep_only`. Raises RowsNotReadable.
        """
        place = before, after.version
        if place not in self._changed:
            column = keys.column_names[0]
            self._changed[place] = self._read(before, after, column, keys[column])
        return self._changed[place]

    def keep_only(self, versions: Mapping[str, InputVersion]) -> None:
        """Forget the rows, and every target of which none of the versions is."""
        self._changed.clear()
        targets = {version.target for version in versions.values()}
        self._targets = {uri: target for uri, target in self._targets.items() if uri in targets}

    def _read(self, before: InputVersion, after: TableVersion, column: str, values: pa.ChunkedArray) -> ChangedRows:
        if before.target not in self._targets:
            self._targets[before.target] = FollowedTarget(before.target)
        try:
            return ChangedRows(*self._targets[before.target].changed_rows(before.version, after, column, values))
        except RowsNotReadable:
            return ChangedRows(opened(before).rows(column, values), after.rows(column, values))
