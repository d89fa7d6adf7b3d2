"""Everything else: a string exactly as Postgres sent it, its type named in the field's metadata."""

from __future__ import annotations

import pyarrow as pa

from pipelines.types.family import Family

TEXT = Family("text", pa.string(), lambda texts: texts.cast(pa.string()))
