"""smallint, integer, bigint and oid; oid is unsigned, so it takes the next wider signed type."""

from __future__ import annotations

import pyarrow as pa

from pipelines.types.family import cast_family

BY_OID = {
    21: cast_family("smallint", pa.int16()),
    23: cast_family("integer", pa.int32()),
    20: cast_family("bigint", pa.int64()),
    26: cast_family("oid", pa.int64()),
}
