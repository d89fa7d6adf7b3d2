"""The functions of libpq that the receive loop calls: all are found, and a library without them is a typed error."""

from __future__ import annotations

import ctypes

import pytest
from psycopg import pq

from cdc.errors import LibpqUnusable
from cdc.postgres.libpq import checked, load


def test_every_function_has_an_address() -> None:
    assert all(load())
    assert len(set(load())) == len(load())


def test_another_library_is_an_error_that_names_what_is_missing() -> None:
    with pytest.raises(LibpqUnusable, match="PQlibVersion, PQgetCopyData, PQfreemem, PQconsumeInput is missing"):
        checked(ctypes.CDLL("libm.so.6"), ctypes.CDLL(None), pq.version())


def test_another_libpq_than_that_of_psycopg_is_an_error() -> None:
    class OtherLibpq:
        PQgetCopyData = PQfreemem = PQconsumeInput = staticmethod(lambda: 0)

        @staticmethod
        def PQlibVersion() -> int:  # noqa: N802 - the name in libpq
            return 90_600

    with pytest.raises(LibpqUnusable, match="version 90600 was found"):
        checked(OtherLibpq, ctypes.CDLL(None), pq.version())
