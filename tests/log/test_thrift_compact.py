"""Thrift's compact protocol: what is read from a Parquet footer is written with the same bytes."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.log.thrift_compact import Field, Struct, ThriftList, decode_struct, encode_struct

I16, I32, I64, DOUBLE, BINARY, LIST, STRUCT = 4, 5, 6, 7, 8, 9, 12
SCALARS = st.one_of(
    st.booleans().map(lambda value: Field(1 if value else 2, value)),
    st.integers(-(1 << 63), (1 << 63) - 1).map(lambda value: Field(I64, value)),
    st.integers(-(1 << 15), (1 << 15) - 1).map(lambda value: Field(I16, value)),
    st.binary(min_size=8, max_size=8).map(lambda value: Field(DOUBLE, value)),
    st.binary(max_size=200).map(lambda value: Field(BINARY, value)),
    st.lists(st.integers(-9, 9), max_size=20).map(lambda values: Field(LIST, ThriftList(I32, values))),
)


def structs(fields: st.SearchStrategy[Field]) -> st.SearchStrategy[Struct]:
    return st.dictionaries(st.integers(1, 300), fields, max_size=6).map(lambda found: dict(sorted(found.items())))


NESTED = structs(SCALARS | structs(SCALARS).map(lambda value: Field(STRUCT, value)))


@given(NESTED)
def test_a_struct_that_was_written_is_read_as_it_was(struct: Struct) -> None:
    assert decode_struct(encode_struct(struct)) == struct


def footer() -> bytes:
    """The footer of a file with values of many types."""
    rows = pa.table({"a": [1, 2], "b": ["x", None], "c": [[1.5], []], "d": [True, False]})
    stream = pa.BufferOutputStream()
    pq.write_table(rows, stream, row_group_size=1)
    content = stream.getvalue().to_pybytes()
    size = int.from_bytes(content[-8:-4], "little")
    return content[-8 - size : -8]


def test_a_footer_that_was_read_is_written_with_the_same_bytes() -> None:
    assert encode_struct(decode_struct(footer())) == footer()


def test_bytes_that_are_no_struct_are_refused() -> None:
    with pytest.raises(ValueError, match="ends before its last field"):
        decode_struct(footer()[:100])
    with pytest.raises(ValueError, match="has type 14"):
        decode_struct(b"\x1e\x00")
