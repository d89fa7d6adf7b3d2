"""Durations and sizes: text with units, read and printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from cdc.config.units import print_seconds, print_size, seconds, size


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0.0), (0, 0.0), ("100ms", 0.1), ("10s", 10.0), ("1.5m", 90.0), ("1 h", 3600.0), ("7d", 604800.0)],
)
def test_a_duration_is_seconds(text: object, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "10", 10, 1.5, True, None, "s", "-1s", "1e3s", "10 sec", "10S", "٣s", "1s1s", []])
def test_a_duration_that_names_no_unit_is_refused(text: object) -> None:
    with pytest.raises(PydanticCustomError):
        seconds(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [(0, 0), (5, 5), ("512", 512), ("1kB", 1000), ("16MiB", 16 * 2**20), ("10GB", 10**10), ("1.5KiB", 1536)],
)
def test_a_size_is_bytes(text: object, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "16mib", "16 M", -1, 1.5, True, None, "1.0001kB ", "0.3B", {}])
def test_a_size_of_no_known_unit_is_refused(text: object) -> None:
    with pytest.raises(PydanticCustomError):
        size(text)


@given(st.integers(0, 10**15 - 1))
def test_a_printed_size_reads_back(value: int) -> None:
    assert size(print_size(value)) == value


@given(st.integers(0, 10**6).map(lambda n: n / 1000))
def test_a_printed_duration_reads_back(value: float) -> None:
    assert seconds(print_seconds(value)) == pytest.approx(value)
