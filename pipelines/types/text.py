"""Everything else: a string exactly as Postgres sent it, its type named in the field's metadata."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from pipelines.types.family import Family

TEXT_OID: Final = 25
TEXT_ARRAY_OID: Final = 1009
TEXT = Family("text", pa.string(), lambda texts: texts.cast(pa.string()))
