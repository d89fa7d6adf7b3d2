"""The captured database: the syntax check of a DSN, whose errors repeat no part of it."""

from __future__ import annotations

import pytest
from pydantic_core import PydanticCustomError

from cdc.config.source import Manage, Publication, check_dsn, contains_password

PASSWORD = "c4n4ry"


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://user@host:5432/shop?sslmode=require",
        "postgres:///shop?host=%2Frun",
        "postgresql://user@[::1]:5432,other:5433/shop",
        "host=/run dbname=shop user='a b'",
    ],
)
def test_a_dsn_that_libpq_accepts_is_accepted(dsn: str) -> None:
    check_dsn(dsn)
    assert not contains_password(dsn)


@pytest.mark.parametrize(
    ("dsn", "message"),
    [
        (f"postgresql://user:{PASSWORD}@host/a b", "white space"),
        (f"postgresql://user:{PASSWORD}%zz@host/shop", "'%' without two hexadecimal digits after it"),
        (f"postgresql://user:{PASSWORD}@host@other/shop", "malformed DSN"),
        (f"postgresql://user:{PASSWORD}@host:99999/shop", "invalid port"),
        (f"postgresql://user:{PASSWORD}@host/shop?sslmode=always", "unknown sslmode"),
        (f"password={PASSWORD} shop", "malformed DSN"),
        ("", "malformed DSN"),
    ],
)
def test_a_malformed_dsn_is_an_error_without_the_password(dsn: str, message: str) -> None:
    with pytest.raises(PydanticCustomError, match=message) as error:
        check_dsn(dsn)
    assert PASSWORD not in str(error.value)


@pytest.mark.parametrize(
    "dsn", ["postgresql://u:p@h/d", "postgresql://u@h/d?password=p", "host=h password=p", "password='a b'"]
)
def test_a_password_is_found_in_every_form(dsn: str) -> None:
    assert contains_password(dsn)


def test_manage_decides_which_publications_the_reader_may_alter() -> None:
    assert [Publication(manage=manage).alter for manage in Manage] == [None, True, False]
