"""The documented examples of AUTO CDC, in the order that a log has: the rows of its documentation, by both writers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdc.config import TableSettings
from pipelines.sinks.delta.settings import Writer
from tests.contracts.histories import RELATION, Lake
from tests.pipelines.fold_model import Row, log_row

PEOPLE = [
    # (sequence, id, op, name, city) of each change
    (1, 124, "c", "Raul", "Oaxaca"),
    (1, 123, "c", "Isabel", "Monterrey"),
    (2, 125, "c", "Mercedes", "Tijuana"),
    (2, 126, "c", "Lily", "Cancun"),
    (5, 125, "u", "Mercedes", "Mexicali"),
    (5, 123, "u", "Isabel", "Chihuahua"),
    (6, 125, "u", "Mercedes", "Guadalajara"),
    (6, 123, "d", None, None),
]
TRUNCATE = [(3, None, "t", None, None)]
"""The last line of the example, which says that all before it is gone."""
NOW = {(124, "Raul", "Oaxaca"), (125, "Mercedes", "Guadalajara"), (126, "Lily", "Cancun")}
VERSIONS = {
    (123, "Isabel", "Monterrey", 1, 5),
    (123, "Isabel", "Chihuahua", 5, 6),
    (124, "Raul", "Oaxaca", 1, None),
    (125, "Mercedes", "Tijuana", 2, 5),
    (125, "Mercedes", "Mexicali", 5, 6),
    (125, "Mercedes", "Guadalajara", 6, None),
    (126, "Lily", "Cancun", 2, None),
}
WITHOUT_CITY = {
    (123, "Isabel", "Chihuahua", 1, 6),
    (124, "Raul", "Oaxaca", 1, None),
    (125, "Mercedes", "Guadalajara", 2, None),
    (126, "Lily", "Cancun", 2, None),
}
WHOLE, APART = [6], [1, 2, 3, 5, 6]
CUTS = [WHOLE, APART, [5, 6]]


def written(*by_copying: list[int]) -> pytest.MarkDecorator:
    """Who writes, and where the ranges end; the default run has the indexed writer in two ways, and these."""
    quick = {"indexed": (WHOLE, APART), "copy-on-write": by_copying, "spark": ()}
    return pytest.mark.parametrize(
        ("writing", "ends"),
        [
            pytest.param(writer, ends, marks=() if ends in quick[writer] else pytest.mark.slow)
            for writer in quick
            for ends in CUTS
        ],
        indirect=["writing"],
        ids=str,
    )


def people(*more: tuple[Any, ...]) -> list[Row]:
    found = []
    for ordinal, (position, id_, op, name, city) in enumerate(sorted([*PEOPLE, *more], key=lambda row: row[0])):
        image = {"before": {1: str(id_)}} if op == "d" else {"after": {1: str(id_), 2: name, 3: city}}
        said = {} if op == "t" else {"key": [str(id_)], **image}
        found.append(log_row(RELATION, (position, ordinal), op, **said))
    return found


@pytest.fixture(name="writing")
def _writing(request: pytest.FixtureRequest) -> tuple[Writer, Any]:
    """Who writes, and the session if that is Spark."""
    return Writer(request.param), request.getfixturevalue("spark") if request.param == "spark" else None


def filled(folder: Path, said: dict[str, Any], writing: tuple[Writer, Any], rows: list[Row], ends: list[int]) -> Lake:
    """A target that was given the log in ranges, and in the end the first of them once more."""
    lake, after = Lake(str(folder), TableSettings(**said), *writing), 0
    for upto in ends:
        lake.publish(lake.apply(rows, after, upto), upto)
        after = upto
    lake.start()
    lake.apply(rows, 0, ends[0])
    return lake


@written(APART)
@pytest.mark.parametrize(
    ("more", "expected"), [([], NOW), (TRUNCATE, {(125, "Mercedes", "Guadalajara")})], ids=["all", "truncated"]
)
def test_the_examples_of_type_1_give_the_rows_of_their_documentation(
    tmp_path: Path, writing: tuple[Writer, Any], more: list[Any], expected: set[Any], ends: list[int]
) -> None:
    found = filled(tmp_path, {"stored_as_scd_type": 1}, writing, people(*more), ends).rows()

    assert {(row["id"], row["plain"], row["large"]) for row in found} == expected
    assert len(found) == len(expected)


@written(APART)
def test_the_examples_of_type_2_give_the_rows_of_their_documentation(
    tmp_path: Path, writing: tuple[Writer, Any], ends: list[int]
) -> None:
    check_versions(tmp_path, writing, {}, ends, VERSIONS)


@written([5, 6])
@pytest.mark.parametrize(
    "said",
    [{"track_history_except_column_list": ("large",)}, {"track_history_column_list": ("plain",)}],
    ids=["all but city", "name"],
)
def test_a_column_that_is_not_tracked_begins_no_version_in_the_examples_of_type_2(
    tmp_path: Path, writing: tuple[Writer, Any], said: dict[str, Any], ends: list[int]
) -> None:
    check_versions(tmp_path, writing, said, ends, WITHOUT_CITY)


def check_versions(
    tmp_path: Path, writing: tuple[Writer, Any], said: dict[str, Any], ends: list[int], expected: set[Any]
) -> None:
    """See that a target of type 2 has these versions after the ranges."""
    found = filled(tmp_path, {"stored_as_scd_type": 2, **said}, writing, people(), ends).rows()

    assert {(r["id"], r["plain"], r["large"], r["__START_AT"], r["__END_AT"]) for r in found} == expected
    assert len(found) == len(expected)
    assert all(r["_valid_from"].timestamp() == r["__START_AT"] for r in found)
    assert {r["_valid_to"] and r["_valid_to"].timestamp() for r in found} == {r["__END_AT"] for r in found}
