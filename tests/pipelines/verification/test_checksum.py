"""Row hashes and digests: independent of the order and the batches of the rows."""

from __future__ import annotations

from hashlib import sha256

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cdc.postgres.key_range_digests import Digest
from pipelines.verification.canonical_text import text_batch
from pipelines.verification.checksum import BUCKETS, Checksum, digest_of, row_hashes

texts = st.none() | st.text(max_size=12)


@given(st.lists(texts, min_size=1), st.integers(0, 3))
def test_the_hash_of_a_row_does_not_depend_on_its_batch(values: list[str | None], skipped: int) -> None:
    whole = pa.array(values, pa.string())
    assert row_hashes([whole.slice(skipped)]).tolist() == row_hashes([whole])[skipped:].tolist()


def test_hashes_of_near_texts_spread_over_the_buckets() -> None:
    many = row_hashes([pa.array([str(number) for number in range(BUCKETS)])])
    assert len(set(many.tolist())) == BUCKETS
    assert len({value % BUCKETS for value in many.tolist()}) > BUCKETS * 0.6


def test_checksums_differ_only_in_the_bucket_of_a_changed_row() -> None:
    key, before, after = (pa.array(values) for values in (["1", "2"], ["a", "b"], ["a", "c"]))
    sides = Checksum(), Checksum()
    for side, value in zip(sides, (before, after), strict=True):
        side.add([key, value], [key])
    assert len(sides[0].differing(sides[1])) == 1
    assert sides[0].rows == 2


def test_a_digest_is_the_sum_of_the_hashes_of_lengths_and_texts() -> None:
    rows = text_batch([pa.array(["a", None], pa.string()), pa.array(["", "é"], pa.string())])
    hashes = [sha256(text.encode()).digest() for text in ("1:a0:", "-1:é")]
    words = [sum(int.from_bytes(found[start : start + 8]) for found in hashes) % 2**64 for start in (0, 8)]
    assert digest_of([rows]) == Digest(2, *words)
