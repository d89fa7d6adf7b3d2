"""Masks of columns: what they show, and when two of them are the same."""

from __future__ import annotations

import hashlib
import hmac

import pyarrow as pa
import pytest

from cdc.stores.column_mask import Mask


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
