"""The import guard against pandas, in a process of its own, because imports cannot be set back."""

from __future__ import annotations

import subprocess
import sys

PANDAS = """
import sys
from cdc.import_guard import accept_pandas, refuse_pandas

refuse_pandas()
refuse_pandas()
import pyarrow as pa

assert pa.array([1, 2]).to_pylist() == [1, 2]
assert "pandas" not in sys.modules
accept_pandas()
accept_pandas()
import pandas
"""


def test_arrays_need_no_pandas_and_spark_still_gets_it() -> None:
    done = subprocess.run([sys.executable, "-c", PANDAS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
