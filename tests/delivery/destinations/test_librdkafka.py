"""The functions of librdkafka that a delivery calls: all are there, and a library without them is a typed error."""

from __future__ import annotations

import ctypes

import confluent_kafka
import pytest

from cdc.delivery.destinations.librdkafka import FUNCTIONS, Librdkafka, Piece, Report, checked, load
from cdc.errors import ClientMissing


def test_the_library_of_the_package_has_every_function() -> None:
    assert load().waiting.rd_kafka_version() == confluent_kafka.libversion()[1]
    assert {name for name in FUNCTIONS if not hasattr(load().quick, name)} == set()


def test_another_library_is_an_error_that_names_what_is_missing() -> None:
    libc = Librdkafka(ctypes.CDLL(None), ctypes.PyDLL(None))

    with pytest.raises(ClientMissing, match="has no rd_kafka_version, rd_kafka_last_error") as raised:
        checked(libc, confluent_kafka.libversion()[1])
    assert "uv pip install" in raised.value.fix


def test_a_library_of_another_version_is_an_error() -> None:
    with pytest.raises(ClientMissing, match="expects 0x1010101"):
        checked(load(), 0x01010101)


def test_the_structures_have_the_sizes_of_the_public_header() -> None:
    assert ctypes.sizeof(Piece) == 8 + 64
    assert ctypes.sizeof(Report) == 9 * 8
