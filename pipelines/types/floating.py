"""real and double precision: shortest text that reads back to the same bits, NaN and infinities included.

real is read as 32 bits at once: by way of 64 bits it would be rounded twice.
"""

from __future__ import annotations

import pyarrow as pa

from pipelines.types.family import cast_family

BY_OID = {700: cast_family("real", pa.float32()), 701: cast_family("double precision", pa.float64())}
