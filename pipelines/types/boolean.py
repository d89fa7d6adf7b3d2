"""boolean: `t` and `f`."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.types.family import Family


def _convert(texts: pa.Array) -> pa.Array:
    true = pc.equal(texts, "t")
    known = pc.or_(true, pc.equal(texts, "f"))
    if pc.all(known, min_count=0).as_py() is False:
        raise pa.ArrowInvalid("boolean text other than 't' and 'f'")
    return true


BOOLEAN = Family("boolean", pa.bool_(), _convert)
BY_OID = {16: BOOLEAN}
