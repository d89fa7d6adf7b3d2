"""A first batch compiles nothing: load_kernels has compiled the functions of the key index for every type of key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FIRST_BATCH = """
from pathlib import Path
import pyarrow as pa
from cdc.cached_njit import only_cached
from pipelines.sinks.delta.indexed.key_hashes import hash_keys
from pipelines.sinks.delta.indexed.key_index import KeyIndex
from pipelines.sinks.delta.indexed.load_kernels import load_cached_kernels, load_kernels

load_cached_kernels()
assert not [*Path(CACHE).rglob("*.nbc")], "the function that only loads has compiled"
load_kernels()
columns = pa.array([1, 2, 3]), pa.array(["a", "b", "c"]), pa.array([b"a", b"b", b"c"])
with only_cached():  # raises FunctionNotCached where numba would compile
    index = KeyIndex(None, "t")
    for number, keys in enumerate([[column] for column in columns] + [[*columns]]):
        hashes, rows = hash_keys([pa.chunked_array([key]) for key in keys], bytes(16))
        index.add({str(number): (hashes, rows)})
        assert {*index.find(hashes).wanted} == {0, 1, 2}
    index.close()
"""


def test_a_first_batch_compiles_nothing_after_the_functions_were_loaded(tmp_path: Path) -> None:
    """In a process of its own: in this one other tests have called the functions."""
    code = f"CACHE = {str(tmp_path)!r}\n{FIRST_BATCH}"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
