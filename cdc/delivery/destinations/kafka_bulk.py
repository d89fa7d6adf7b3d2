"""Passes columns of events to the Kafka client, without an object of Python for each event.

`Producer.produce` takes 3 µs for an event, most of them for its arguments, and `Producer.produce_batch` sends no
headers. The C library below it takes a message as a list of pieces of memory, which are here addresses in the columns.
The arguments of its function are made once, because ctypes needs longer to convert them than to call the function.

The producer, its settings, transactions and callbacks stay those of confluent-kafka: only its handle of the C library
is read, from the place where this version has it. A message that is passed here has no callback. If a broker refuses
it, the transaction fails, and the caller sends its events again by `produce`, whose callback says which one it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Self

import confluent_kafka
import numpy as np
import pyarrow as pa
from confluent_kafka import Producer, cimpl

from cdc.delivery.destinations.contract import ID_HEADER, POSITION_HEADER, XID_HEADER
from cdc.delivery.destinations.event_columns import EventFields

VERSION: Final = "2.16.1"
"""The version of confluent-kafka whose objects are known here."""
AT_ONCE: Final = 500
"""Number of events whose messages are described at once; their description takes 250 KiB, and so stays in a cache."""
_HANDLE: Final = object.__basicsize__
"""Offset of the handle in the object of a producer: it is the first field after those of every object."""
# kinds of pieces, and a flag, of the function rd_kafka_produceva
_TOPIC, _VALUE, _KEY, _FLAGS, _HEADER = 2, 4, 5, 7, 9
_COPY: Final = 2
"""The client copies the message before the call returns."""
_PIECES: Final = (_TOPIC, _FLAGS, _KEY, _VALUE, _HEADER, _HEADER, _HEADER)
_FIRST: Final = 2
"""Place of the first piece that each event has of its own."""
_COUNT: Final = ctypes.c_size_t.from_param(len(_PIECES))
"""Number of pieces, as an argument."""
_WORDS: Final = 9
"""Words of eight bytes of a piece: its kind, and a union of eight."""
_HEADERS: Final = [ctypes.create_string_buffer(one.encode()) for one in (ID_HEADER, POSITION_HEADER, XID_HEADER)]
_NOTHING: Final = ctypes.create_string_buffer(8)
"""Memory to which empty values point; a value without an address is NULL."""
_Memory = tuple[np.ndarray, np.ndarray]
"""Address and number of bytes of each value."""


class _Pieces(NamedTuple):
    """Where the pieces of the messages of some events are."""

    topic_numbers: np.ndarray
    """Number of the topic of each."""
    memory: Sequence[_Memory]
    """Of keys, values and headers, in the order of _PIECES."""

    @classmethod
    def of(cls, fields: EventFields) -> Self:
        """Return the pieces of the events."""
        own = [_memory_of(texts) for texts in (fields.keys, fields.values, fields.ids)]
        shared = [_memory_of(texts) for texts in (fields.position_texts, fields.xid_texts)]
        return cls(fields.topic_numbers, own + [(a[fields.transactions], n[fields.transactions]) for a, n in shared])


class BulkSender:
    """Passes events to one producer."""

    def __init__(self, producer: Producer, library: Any) -> None:
        self._producer = producer  # so that its handle stays valid
        self._library = library
        self._handle = ctypes.c_void_p.from_param(ctypes.c_void_p.from_address(id(producer) + _HANDLE).value)
        memory: Any = ctypes.create_string_buffer(AT_ONCE * len(_PIECES) * _WORDS * np.dtype(np.uint64).itemsize)
        self._messages = np.frombuffer(memory, np.uint64).reshape(AT_ONCE, len(_PIECES), _WORDS)
        self._messages[:, :, 0] = _PIECES
        self._messages[:, 1, 1] = _COPY
        self._messages[:, 4:, 1] = [ctypes.addressof(name) for name in _HEADERS]
        stride = self._messages.strides[0]
        self._places = [ctypes.byref(memory, number * stride) for number in range(AT_ONCE)]

    @classmethod
    def of(cls, producer: Producer, version: str = confluent_kafka.__version__) -> Self | None:
        """Return the sender of a producer; None if its version is not the known one."""
        if version != VERSION:
            return None
        # without releasing the interpreter lock: a thread that gets it for the time of a call keeps it for 5 ms
        library = ctypes.PyDLL(cimpl.__file__)
        library.rd_kafka_produceva.restype = library.rd_kafka_topic_new.restype = ctypes.c_void_p
        return cls(producer, library)

    def send(self, fields: EventFields, first: int) -> int:
        """Pass the events from `first` on; return the index of the one that the client does not take, or the end.

        fields: of events without more headers.
        """
        pieces = _Pieces.of(fields)
        with self._topics(fields.topics) as topics:
            while first < len(fields.ids):
                count = self._describe(pieces, topics, first)
                taken = self._pass(count)
                first += taken
                if taken < count:
                    break
        return first

    @contextmanager
    def _topics(self, names: Sequence[str]) -> Iterator[np.ndarray]:
        """Yield the topics as the client knows them, which it would otherwise look up by name for each event."""
        found = [self._library.rd_kafka_topic_new(self._handle, name.encode(), None) for name in names]
        try:
            yield np.array(found, np.uint64)
        finally:
            for topic in filter(None, found):
                self._library.rd_kafka_topic_destroy(ctypes.c_void_p(topic))

    def _describe(self, pieces: _Pieces, topics: np.ndarray, first: int) -> int:
        """Write the descriptions of the messages from the first one on; return how many there is room for."""
        some = slice(first, first + AT_ONCE)
        numbers = pieces.topic_numbers[some]
        messages = self._messages[: len(numbers)]
        messages[:, 0, 1] = topics[numbers]
        for place, (addresses, sizes) in enumerate(pieces.memory, _FIRST):
            # the first word of a header is the address of its name
            word = 2 if _PIECES[place] == _HEADER else 1
            messages[:, place, word], messages[:, place, word + 1] = addresses[some], sizes[some]
        return len(numbers)

    def _pass(self, count: int) -> int:
        """Pass the first messages to the client; return how many it takes."""
        handle, produce = self._handle, self._library.rd_kafka_produceva
        for number, place in enumerate(self._places[:count]):
            error = produce(handle, place, _COUNT)
            if error is not None:
                self._library.rd_kafka_error_destroy(ctypes.c_void_p(error))
                return number
        return count


def _memory_of(values: pa.Array) -> _Memory:
    """Return the address and the number of bytes of each value; both are 0 for a null."""
    if not len(values):
        return np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    is_large = pa.types.is_large_binary(values.type) or pa.types.is_large_string(values.type)
    _, offsets, content = values.buffers()
    width = np.int64 if is_large else np.int32
    ends = np.frombuffer(offsets, width)[values.offset : values.offset + len(values) + 1].astype(np.uint64)
    start = ctypes.addressof(_NOTHING) if content is None or not content.size else content.address
    places, sizes = ends[:-1] + np.uint64(start), np.diff(ends)
    if values.null_count:
        is_valid = values.is_valid().to_numpy(zero_copy_only=False)
        places, sizes = places * is_valid, sizes * is_valid
    return places, sizes
