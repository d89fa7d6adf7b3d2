"""Compiling or loading all numba functions of this package, for the argument types that their callers use.

Compiling takes seconds; loading from numba's cache takes 0.1 s. Both keep the GIL, and so stop all stages of a reader.
So a reader calls load_kernels before the stream begins; a test asserts that nothing is compiled later.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from cdc.cached_njit import FunctionNotCached, only_cached
from cdc.lsn import Lsn
from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.pgoutput.lsn_check import LsnCheck
from cdc.pgoutput.message_parser import FrameBatch
from cdc.pgoutput.stream_blocks import kind_set, next_of, readonly_arrays, unwrap
from cdc.position import Position
from cdc.table import Column, ReplicaIdentity, TableSchema

_NONE = FrameBatch.of(())
_TABLE = TableSchema(
    relation=1,
    oid=1,
    schema="any",
    name="any",
    replica_identity=ReplicaIdentity.DEFAULT,
    columns=(Column(id=1, name="any", type_oid=25, type_name="text", key=0),),
)


def load_cached_kernels() -> None:
    """Load the kernels that the cache contains, and compile none."""
    with only_cached(), suppress(FunctionNotCached):
        load_kernels()


def load_kernels() -> None:
    """Compile all kernels of this package, or load them from the cache; compiling takes about 20 s of CPU."""
    next_of(*readonly_arrays(_NONE), 0, kind_set(b""))
    unwrap(_NONE, np.empty(0, np.int64))
    LsnCheck(Lsn(0)).checked(_NONE)
    for _ in ColumnarDecoder().decode(_NONE):
        pass
    load_copy_kernels()


def load_copy_kernels() -> None:
    """Compile the kernels that decode the rows of a COPY, or load them from the cache."""
    CopyDecoder(_TABLE, position=Position(0), xid=0, committed_at=0, first_ordinal=0).feed(b"any\n")
