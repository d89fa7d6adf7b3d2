"""Changed rows of an input: from its files, or by a search where these do not show them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from cdc.log.computed_views import InputVersion
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.table_version import RowsNotReadable
from pipelines.views.followed_inputs import FollowedInputs, opened
from pipelines.views.needed_rows import ChangedRows
from tests.contracts.folded import batch, put

KEYS = pa.table({"id": [1, 2]})


@pytest.fixture(name="versions")
def _versions(tmp_path: Path) -> list[InputVersion]:
    """Three versions of a target, in each of which the item of its row 1 has another number."""
    sink, found = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}")), []
    sink.open("log-1")
    for number in range(3):
        upto = 20 * (number + 1)
        made = sink.apply(batch([put(1, f"{number}", upto)], upto - 20, upto, generation=None if number else 1))
        found.append(InputVersion(made.target, made.version or 0, made.relation))
    return found


def items(changed: ChangedRows) -> tuple[list[str], list[str]]:
    return changed.old["item"].to_pylist(), changed.new["item"].to_pylist()


def test_steps_follow_each_other_or_begin_again(versions: list[InputVersion]) -> None:
    followed, found = FollowedInputs(), []
    for before, after in ((0, 1), (1, 2), (0, 2), (0, 2)):
        found.append(items(followed.changed_rows(versions[before], opened(versions[after]), KEYS)))
        followed.keep_only({"shop.orders": versions[after]})

    assert found == [(["0"], ["1"]), (["1"], ["2"]), (["0"], ["2"]), (["0"], ["2"])]


def test_the_views_of_a_step_share_the_rows(versions: list[InputVersion]) -> None:
    followed, after = FollowedInputs(), opened(versions[1])

    assert followed.changed_rows(versions[0], after, KEYS) is followed.changed_rows(versions[0], after, KEYS)


def test_rows_that_the_files_do_not_show_are_searched(versions: list[InputVersion]) -> None:
    table = DeltaTable(versions[0].target)
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
    schema = table.schema()
    table.alter.add_columns([type(schema.fields[0])("more", "string")])
    now = InputVersion(versions[0].target, DeltaTable(versions[0].target).version(), versions[0].relation)

    assert items(FollowedInputs().changed_rows(versions[0], opened(now), KEYS)) == (["0"], ["2"])


def test_a_version_that_was_removed_is_not_readable(versions: list[InputVersion]) -> None:
    removed = InputVersion(versions[0].target, 99, versions[0].relation)

    with pytest.raises(RowsNotReadable):
        FollowedInputs().changed_rows(removed, opened(versions[2]), KEYS)
