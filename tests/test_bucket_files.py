"""Paths in an object store: which URL is one, how its parts are named, and what a failure of the store becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.bucket_files import BucketPath, as_root, options_of, storage_errors
from cdc.errors import LogError, LogInaccessible, LogUnreachable

LAKE = BucketPath("s3://lake", "shop/log", (("secret_access_key", "hidden"),))


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("/data/log", Path("/data/log")),
        ("file:///data/log", Path("/data/log")),
        ("s3://lake/shop/log/", BucketPath("s3://lake", "shop/log")),
        ("s3a://lake//shop", BucketPath("s3://lake", "shop")),
        ("gs://lake", BucketPath("gs://lake", "")),
    ],
)
def test_a_url_of_a_store_is_a_path_in_its_bucket(text: str, root: object) -> None:
    assert as_root(text) == root


def test_the_parts_of_a_path_are_those_of_pathlib() -> None:
    file = LAKE / "changes" / "a.parquet"
    assert (str(file), file.name, file.stem) == ("s3://lake/shop/log/changes/a.parquet", "a.parquet", "a")
    assert file.parent == LAKE / "changes"
    assert str(BucketPath("s3://lake", "") / "x") == "s3://lake/x"


def test_secrets_are_given_to_the_store_and_never_shown() -> None:
    assert (options_of(LAKE) or {})["secret_access_key"] == "hidden"
    assert options_of(Path("log")) is None
    assert "hidden" not in repr(LAKE)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("NoSuchBucket: lake", LogInaccessible),
        ("AccessDenied", LogInaccessible),
        ("Generic S3 error: 400 Bad Request", LogInaccessible),
        ("Generic S3 error: 503 Service Unavailable", LogUnreachable),
        ("Error performing GET", LogUnreachable),
    ],
)
def test_a_failure_of_the_store_is_an_error_of_the_log(text: str, error: type[LogError]) -> None:
    with pytest.raises(error, match="s3://lake"), storage_errors(LAKE):
        raise OSError(text)


@pytest.mark.parametrize("exc", [FileNotFoundError("a"), ValueError("b")])
def test_other_errors_pass_unchanged(exc: Exception) -> None:
    with pytest.raises(type(exc)), storage_errors(LAKE):
        raise exc


def test_errors_of_a_directory_pass_unchanged() -> None:
    with pytest.raises(OSError, match="AccessDenied"), storage_errors(Path("log")):
        raise OSError("AccessDenied")
