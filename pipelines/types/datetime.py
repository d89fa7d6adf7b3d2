"""date, timestamp and timestamptz, as DateStyle ISO and TimeZone UTC print them.

Years 1 to 9999 are held; `infinity`, years BC and years above 9999 are refused, because neither
Delta nor its readers have them. `time`, `timetz` and `interval` stay text: `24:00:00` and months
of unknown length have no Arrow value that Delta stores.
"""

from __future__ import annotations

import pyarrow as pa

from pipelines.types.family import cast_family

BY_OID = {
    1082: cast_family("date", pa.date32()),
    1114: cast_family("timestamp", pa.timestamp("us")),
    1184: cast_family("timestamptz", pa.timestamp("us", tz="UTC")),
}
