"""Errors of damaged targets: which errors of the writers mean damage, and which may pass."""

from __future__ import annotations

import pytest
from deltalake.exceptions import CommitFailedError, DeltaError

from cdc.errors import TargetDamaged, TargetUnusable
from pipelines.sinks.delta.damage_errors import reading


@pytest.mark.parametrize(
    "text",
    [
        "Kernel error: Json error: Encountered unexpected 'g' whilst parsing value\n0: <unknown>",
        "Generic DeltaTable error: Parquet error: Object Store error: Object at location /a/b not found",
        "Kernel error: Generic delta kernel error: Expected contiguous commit files, but found gap",
        "Object Store error: Generic LocalFileSystem error: Requested range was invalid",
    ],
)
def test_a_damaged_file_is_named_without_a_stack(text: str) -> None:
    with (
        pytest.raises(TargetDamaged, match="files of target '/lake/t' are damaged or missing") as raised,
        reading("/lake/t"),
    ):
        raise DeltaError(text)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    "error",
    [
        DeltaError("Parquet error: Generic S3 error: Error after 10 retries"),
        DeltaError("something else"),
        CommitFailedError("Parquet error of a conflict"),
    ],
)
def test_what_may_pass_is_raised_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, reading("s3://bucket/t"):
        raise error
    assert raised.value is error


def test_features_are_refused_as_before() -> None:
    with pytest.raises(TargetUnusable, match="features") as raised, reading("/lake/t"):
        raise DeltaError("Unsupported table features required: [Unheard]")
    assert not isinstance(raised.value, TargetDamaged)
