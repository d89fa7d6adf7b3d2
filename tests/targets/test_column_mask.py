"""Masks of columns, and what a rule makes of the columns of a table."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pyarrow as pa
import pytest

from cdc.config import Transform
from cdc.config.secret import Secret
from cdc.errors import TransformFailed
from cdc.targets.column_mask import Mask, transformed_columns
from cdc.targets.dead_letter_rows import MASKED
from tests.log.rows import schema_of


def hashed(text: str) -> str:
    return hmac.new(b"pepper", text.encode(), hashlib.sha256).hexdigest()


@pytest.mark.parametrize(
    ("how", "text", "expected"),
    [
        ("redact", "secret", "***"),
        ("redact", "", "***"),
        ("redact", None, None),
        ("keep_last:4", "+49 30 1234567", "**********4567"),
        ("keep_last:4", "4567", "****"),
        ("keep_last:4", "", ""),
        ("keep_last:2", "Ünïcödé", "*****dé"),
        ("keep_last:2", None, None),
        ("sha256", "a@b.c", hashed("a@b.c")),
        ("sha256", "", hashed("")),
        ("sha256", "ü", hashed("ü")),
        ("sha256", None, None),
    ],
)
def test_a_mask_hides_a_text_and_keeps_null(how: str, text: str | None, expected: str | None) -> None:
    assert Mask(how, b"pepper")(pa.chunked_array([[text], [text]], pa.string())).to_pylist() == [expected] * 2


def test_the_fingerprint_of_a_mask_depends_on_the_salt_only_where_the_masked_text_does() -> None:
    found = {how: {Mask(how, salt).fingerprint for salt in (b"a", b"b")} for how in ("sha256", "redact", "keep_last:2")}

    assert {how: len(prints) for how, prints in found.items()} == {"sha256": 2, "redact": 1, "keep_last:2": 1}
    assert len(set.union(*found.values())) == 4


def test_a_text_that_is_masked_already_is_not_masked_again() -> None:
    mask = Mask("keep_last:2")
    once = mask.over("secret")

    assert once == f"{MASKED}****et"
    assert mask(pa.array([once, "secret", None], pa.string())).to_pylist() == ["****et", "****et", None]
    assert mask.over(None) is mask.of_text(None) is None


def rule_of(**fields: Any) -> Transform:
    """A rule."""
    return Transform.model_validate(fields)


def test_columns_are_dropped_renamed_and_masked() -> None:
    schema, masks = transformed_columns(
        rule_of(drop=["note"], rename={"name": "title"}, mask={"name": "redact"}), schema_of(1, "name", "note")
    )

    assert [(one.id, one.name, one.type_name) for one in schema.columns] == [(1, "id", "integer"), (2, "title", "text")]
    assert {number: mask.how for number, mask in masks.items()} == {2: "redact"}


def test_a_hash_has_the_salt_of_the_rule() -> None:
    salt = Secret("pepper", {"env": "SALT"})
    _, masks = transformed_columns(rule_of(mask={"name": "sha256"}, salt=salt), schema_of(1, "name"))

    assert masks[2].of_text("a") == hashed("a")


@pytest.mark.parametrize("fields", [{"drop": ["none"]}, {"mask": {"id": "redact"}}, {"drop": ["id"]}])
def test_a_rule_that_does_not_fit_the_table_or_changes_its_key_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(TransformFailed):
        transformed_columns(rule_of(**fields), schema_of(1, "name"))
