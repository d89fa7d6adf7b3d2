"""Text of typed values: a real Postgres prints the same values, and its texts become the same values again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.table import Column
from pipelines.types.families import TypePolicy, declared_as, family_of
from pipelines.types.postgres_text import to_postgres_text
from tests.fixtures.postgres import open_session

FIRST_DAY, LAST_DAY = -2_440_588, 2_145_042_905
DAY = 86_400_000_000
NUMBERS = st.integers(-(2**63), 2**63 - 1)


def parsed(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """The texts as a sink reads them."""
    oid, typmod = declared_as(kind)
    column = Column(id=1, name="v", type_oid=oid, type_name="any", typmod=typmod)
    return family_of(column, TypePolicy.EXACT).convert(texts)


def same(values: pa.Array, others: pa.Array) -> bool:
    """Whether the bits are equal, except that NaN is NaN."""
    return str(values.to_pylist()) == str(others.to_pylist())


@pytest.fixture(scope="module")
def dsn(postgres) -> str:
    return postgres.dsn()


def printed(dsn: str, expression: str, numbers: Sequence[float | None], kind: str = "bigint") -> list[str | None]:
    """What Postgres prints for an expression of each number `v`."""
    query = f"SELECT ({expression})::text FROM unnest(%s::{kind}[]) WITH ORDINALITY AS t (v, n) ORDER BY n"
    return [text for (text,) in open_session(dsn).execute(query, [list(numbers)]).fetchall()]  # type: ignore[arg-type]


def floats_near_decimals() -> st.SearchStrategy[float]:
    """Floats whose shortest text is often exactly between two floats."""
    integers = st.builds(lambda digits, power: float(digits * 10**power), st.integers(1, 10**17), st.integers(0, 24))
    powers = st.builds(lambda power, step: float(2**power + step), st.integers(50, 130), st.integers(-64, 64))
    return st.builds(lambda one, sign: one * sign, integers | powers, st.sampled_from((1, -1)))


@given(st.lists(st.none() | st.floats() | floats_near_decimals(), min_size=100, max_size=400))
def test_doubles_have_the_text_of_postgres(dsn: str, numbers: list[float | None]) -> None:
    values = pa.array(numbers, pa.float64())
    texts = to_postgres_text(values)

    assert texts.to_pylist() == printed(dsn, "v", numbers, "float8")
    assert same(parsed(texts, pa.float64()), values)


@given(
    st.lists(
        st.none()
        | st.floats(width=32)
        | floats_near_decimals().filter(lambda number: abs(number) < 1e38).map(lambda number: float(np.float32(number)))
        | st.integers(2**22, 2**26).map(lambda number: float(np.float32(number))),
        min_size=100,
        max_size=400,
    )
)
def test_reals_have_the_text_of_postgres(dsn: str, numbers: list[float | None]) -> None:
    values = pa.array(numbers, pa.float32())
    texts = to_postgres_text(values)

    assert texts.to_pylist() == printed(dsn, "v::real", numbers, "float8")
    assert same(parsed(texts, pa.float32()), values)


def test_powers_of_two_have_the_text_of_postgres(dsn: str) -> None:
    doubles = [math.ldexp(1, power) for power in range(-1074, 1024)]
    reals = [math.ldexp(1, power) for power in range(-149, 128)]

    assert to_postgres_text(pa.array(doubles)).to_pylist() == printed(dsn, "v", doubles, "float8")
    assert to_postgres_text(pa.array(reals, pa.float32())).to_pylist() == printed(dsn, "v::real", reals, "float8")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1e23, "9.999999999999999e+22"),
        (18014398509481992.0, "1.8014398509481992e+16"),
        (1e14, "100000000000000"),
        (1e15, "1e+15"),
        (0.00001, "1e-05"),
        (5e-324, "5e-324"),
        (-0.0, "-0"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
        (float("-inf"), "-Infinity"),
    ],
)
def test_a_double_is_printed_like_this(number: float, text: str) -> None:
    assert to_postgres_text(pa.array([number])).to_pylist() == [text]


@given(st.lists(st.none() | st.integers(FIRST_DAY, LAST_DAY) | st.integers(-800_000, 20_000), max_size=50))
def test_dates_have_the_text_of_postgres(dsn: str, days: list[int | None]) -> None:
    values = pa.array(days, pa.int32()).cast(pa.date32())

    assert to_postgres_text(values).to_pylist() == printed(dsn, "'1970-01-01'::date + v::int", days)


@given(st.lists(st.none() | st.integers(FIRST_DAY * DAY, 2**63 - 1) | st.integers(-(10**16), 10**16), max_size=50))
def test_timestamps_have_the_text_of_postgres(dsn: str, micros: list[int | None]) -> None:
    whole = "make_interval(days => (v / 86400000000)::int) + (v %% 86400000000) * '1 us'::interval"
    numbers = pa.array(micros, pa.int64())
    moments = to_postgres_text(numbers.cast(pa.timestamp("us", tz="UTC")))

    assert moments.to_pylist() == printed(dsn, f"'1970-01-01+00'::timestamptz + {whole}", micros)
    plain = to_postgres_text(numbers.cast(pa.timestamp("us")))
    assert plain.to_pylist() == [None if text is None else text.replace("+00", "") for text in moments.to_pylist()]


@pytest.mark.parametrize("day", [FIRST_DAY - 1, LAST_DAY + 1])
def test_a_date_that_postgres_does_not_have_is_refused(day: int) -> None:
    with pytest.raises(pa.ArrowInvalid, match="4714-11-24 BC"):
        to_postgres_text(pa.array([0, day], pa.int32()).cast(pa.date32()))


@given(
    st.integers(1, 38).flatmap(lambda precision: st.tuples(st.just(precision), st.integers(0, precision))), st.data()
)
def test_decimals_have_their_scale(declared: tuple[int, int], drawn: st.DataObject) -> None:
    precision, scale = declared
    digits = drawn.draw(st.integers(0, 10**precision - 1).map(lambda number: f"{number:0{scale + 1}}"))
    text = f"{digits[: len(digits) - scale]}.{digits[len(digits) - scale :]}" if scale else digits
    numbers = [Decimal(text), Decimal(f"-{text}"), None]
    texts = to_postgres_text(pa.array(numbers, pa.decimal128(precision, scale)))

    assert texts.to_pylist() == [text, f"-{text}" if int(digits) else text, None]
    assert parsed(texts, pa.decimal128(precision, scale)).to_pylist() == numbers


@given(st.lists(st.none() | st.binary(max_size=20)), st.integers(0, 3))
def test_bytes_are_hexadecimal(contents: list[bytes | None], first: int) -> None:
    values = pa.array(contents, pa.binary()).slice(first)
    texts = to_postgres_text(values)

    assert texts.to_pylist() == [None if one is None else f"\\x{one.hex()}" for one in contents[first:]]
    assert parsed(texts, pa.binary()).equals(values)
    assert to_postgres_text(values.cast(pa.large_binary())).to_pylist() == texts.to_pylist()
