"""Target layout: what is fixed when a target is created, and texts that cannot name a partition."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cdc.config import TableSettings
from cdc.config.delta_sink import HistoryMode
from cdc.errors import CdcError, TargetRulesChanged, TransformFailed, ValueNotRepresentable
from pipelines.sinks.delta.target_layout import (
    PLAIN,
    TargetLayout,
    backticked,
    check_partition_values,
    described_columns,
    double_quoted,
    has_bounds,
    is_partition_type,
    partition_text,
)
from tests.contracts.histories import SETTINGS, Lake
from tests.contracts.stories import history


def test_a_target_that_keeps_something_else_is_refused(tmp_path: Path) -> None:
    rows, positions = history(1, 3)
    for keeping, settings in SETTINGS.items():
        place = f"{tmp_path}/{keeping}"
        Lake(place, settings).apply(rows, 0, positions[0])
        for other in (TableSettings(), *(s for k, s in SETTINGS.items() if k is not keeping)):
            with pytest.raises(
                TargetRulesChanged, match=f"was created with mode '{keeping.value}', but its rule has mode"
            ):
                Lake(place, other).apply(rows, positions[0], positions[1])


def test_a_layout_is_read_back_from_the_properties_that_it_sets() -> None:
    layout = TargetLayout(("day",), {"delta.appendOnly": "false"}, "f00", HistoryMode.MARKED, is_shared=True)
    configuration = {**layout.configuration, "delta.checkpointInterval": "25", "theirs": "too"}

    assert TargetLayout.of(configuration, ["day"], ["delta.checkpointInterval"]) == layout
    assert TargetLayout.of({}, [], []) == PLAIN
    assert PLAIN.configuration == {}
    layout.check("uri", configuration, ["day"])


@pytest.mark.parametrize(
    ("layout", "kind", "message"),
    [
        (TargetLayout(history_mode=HistoryMode.CHANGES), TargetRulesChanged, "was created with mode 'scd1'"),
        (TargetLayout(transform="f00"), TargetRulesChanged, "written with another transform"),
        (TargetLayout(is_shared=True), TransformFailed, "contains a single table, but the rule has merge_tables"),
        (TargetLayout(("day",)), TransformFailed, r"is partitioned by \[\]: expected \['day'\]"),
        (TargetLayout(properties={"delta.x": "1"}), TransformFailed, "another value of table property 'delta.x'"),
    ],
)
def test_a_plain_target_does_not_fit_another_layout(layout: TargetLayout, kind: type[CdcError], message: str) -> None:
    with pytest.raises(kind, match=message):
        layout.check("uri", {}, [])


@pytest.mark.parametrize(
    ("value", "text"), [(None, None), ("a b", "a b"), (7, "7"), (True, "true"), (date(1, 2, 3), "0001-02-03")]
)
def test_a_partition_value_is_spelled_as_delta_spells_it(value: Any, text: str | None) -> None:
    assert partition_text(value) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "an empty text"),
        ("__HIVE_DEFAULT_PARTITION__", "the text that Delta writers use"),
        ("x" * 252, "a text that is too long for a directory name"),
        ("/" * 84, "a text that is too long for a directory name"),
    ],
)
def test_a_text_that_cannot_name_a_directory_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueNotRepresentable, match=f"partition column 'a' contains {reason}"):
        check_partition_values(pa.table({"a": ["fine", text, None]}), ("a",), "shop.orders")


def test_a_text_that_names_a_directory_passes() -> None:
    check_partition_values(pa.table({"a": ["x" * 251, "/" * 83, "é", " ", None], "b": [""] * 5}), ("a",), "t")


@pytest.mark.parametrize(
    ("kind", "partitions", "bounds"),
    [
        (pa.string(), True, True),
        (pa.int64(), True, True),
        (pa.date32(), True, True),
        (pa.bool_(), True, True),
        (pa.timestamp("us"), False, True),
        (pa.decimal128(10, 2), False, True),
        (pa.float64(), False, False),
        (pa.binary(), False, False),
        (pa.list_(pa.int64()), False, False),
    ],
)
def test_some_types_partition_files_or_have_bounds(kind: pa.DataType, partitions: bool, bounds: bool) -> None:
    assert (is_partition_type(kind), has_bounds(kind)) == (partitions, bounds)


def test_a_quote_in_a_name_is_doubled() -> None:
    assert (double_quoted('a"b'), backticked("a`b")) == ('"a""b"', "`a``b`")


def test_statistics_describe_position_and_key_first_and_no_column_without_bounds() -> None:
    kinds = {
        "ratio": pa.float64(),
        "price": pa.decimal128(38, 2),
        "tags": pa.list_(pa.int64()),
        "item": pa.string(),
        "id": pa.int64(),
        "a b": pa.int64(),
    }
    own = [pa.field(name, kind) for name, kind in kinds.items()]
    columns = pa.schema([*own, pa.field("_position", pa.int64()), pa.field("_ordinal", pa.int64())])

    assert described_columns(columns, ["id"]) == ["_position", "_ordinal", "id", "item"]
    wide = pa.schema([pa.field(f"c{n}", pa.int64()) for n in range(50)])
    assert len(described_columns(wide, ["c49"])) == 32
    assert "c49" in described_columns(wide, ["c49"])
