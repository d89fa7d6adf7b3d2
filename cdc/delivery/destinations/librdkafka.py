"""librdkafka: the functions of the C library of confluent-kafka that a delivery calls itself, all of its public API.

`FUNCTIONS` names every one of them, as `rdkafka.h` declares it. `load` looks for them when the first producer is made.
The library comes with confluent-kafka, whose extension module makes its symbols visible.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, Union, c_char, c_char_p, c_int, c_int32, c_int64, c_size_t, c_ssize_t, c_void_p
from functools import lru_cache
from typing import Any, Final, NamedTuple

import confluent_kafka
from confluent_kafka import cimpl

from cdc.errors import ClientMissing

OLDEST: Final = 0x020000FF
"""The oldest version of librdkafka that is accepted: 2.0."""

PRODUCER: Final = 0
CONFIGURATION_OK: Final = 0
PURGE_ALL: Final = 0x1 | 0x2
"""Messages in queues, and those that brokers have not acknowledged."""
COPY: Final = 0x2
"""Flag of a message: the client copies it before the call returns."""
# kinds of pieces of a message: rd_kafka_vtype_t
TOPIC_NAME = 1
TOPIC = 2
PARTITION = 3
VALUE = 4
KEY = 5
FLAGS = 7
HEADER = 9


class _Memory(Structure):
    _fields_ = (("address", c_char_p), ("size", c_size_t))


class _Header(Structure):
    _fields_ = (("name", c_char_p), ("address", c_char_p), ("size", c_ssize_t))


class _Content(Union):
    _fields_ = (
        ("text", c_char_p),
        ("number", c_int),
        ("partition", c_int32),
        ("memory", _Memory),
        ("header", _Header),
        ("reserved", c_char * 64),
    )


class Piece(Structure):
    """One piece of a message: rd_kafka_vu_t."""

    _fields_ = (("kind", c_int), ("content", _Content))


class Report(Structure):
    """The report about one message: rd_kafka_message_t."""

    _fields_ = (
        ("error", c_int),
        ("topic", c_void_p),
        ("partition", c_int32),
        ("value", c_void_p),
        ("value_size", c_size_t),
        ("key", c_void_p),
        ("key_size", c_size_t),
        ("offset", c_int64),
        ("opaque", c_void_p),
    )


ON_REPORT: Final = ctypes.CFUNCTYPE(None, c_void_p, POINTER(Report), c_void_p)
"""Type of a function that gets the report about a message."""
ON_ERROR: Final = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p, c_void_p)
"""Type of a function that gets an error that belongs to no message."""
ON_LOG: Final = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p, c_char_p)
"""Type of a function that gets a log line: level of syslog, word, text."""

FUNCTIONS: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "rd_kafka_version": (c_int, ()),
    "rd_kafka_last_error": (c_int, ()),
    "rd_kafka_conf_new": (c_void_p, ()),
    "rd_kafka_conf_set": (c_int, (c_void_p, c_char_p, c_char_p, c_char_p, c_size_t)),
    "rd_kafka_conf_set_dr_msg_cb": (None, (c_void_p, ON_REPORT)),
    "rd_kafka_conf_set_error_cb": (None, (c_void_p, ON_ERROR)),
    "rd_kafka_conf_set_log_cb": (None, (c_void_p, ON_LOG)),
    "rd_kafka_conf_destroy": (None, (c_void_p,)),
    "rd_kafka_new": (c_void_p, (c_int, c_void_p, c_char_p, c_size_t)),
    "rd_kafka_name": (c_char_p, (c_void_p,)),
    "rd_kafka_set_log_queue": (c_int, (c_void_p, c_void_p)),
    "rd_kafka_destroy": (None, (c_void_p,)),
    "rd_kafka_topic_new": (c_void_p, (c_void_p, c_char_p, c_void_p)),
    "rd_kafka_topic_name": (c_char_p, (c_void_p,)),
    "rd_kafka_topic_destroy": (None, (c_void_p,)),
    "rd_kafka_produceva": (c_void_p, (c_void_p, POINTER(Piece), c_size_t)),
    "rd_kafka_poll": (c_int, (c_void_p, c_int)),
    "rd_kafka_flush": (c_int, (c_void_p, c_int)),
    "rd_kafka_purge": (c_int, (c_void_p, c_int)),
    "rd_kafka_outq_len": (c_int, (c_void_p,)),
    "rd_kafka_init_transactions": (c_void_p, (c_void_p, c_int)),
    "rd_kafka_begin_transaction": (c_void_p, (c_void_p,)),
    "rd_kafka_commit_transaction": (c_void_p, (c_void_p, c_int)),
    "rd_kafka_abort_transaction": (c_void_p, (c_void_p, c_int)),
    "rd_kafka_fatal_error": (c_int, (c_void_p, c_char_p, c_size_t)),
    "rd_kafka_error_code": (c_int, (c_void_p,)),
    "rd_kafka_error_string": (c_char_p, (c_void_p,)),
    "rd_kafka_error_is_fatal": (c_int, (c_void_p,)),
    "rd_kafka_error_is_retriable": (c_int, (c_void_p,)),
    "rd_kafka_error_txn_requires_abort": (c_int, (c_void_p,)),
    "rd_kafka_error_destroy": (None, (c_void_p,)),
}
"""Name of each function → type of its result, types of its arguments."""


class Librdkafka(NamedTuple):
    """The library, twice: a call releases Python's interpreter lock or keeps it."""

    waiting: Any
    """For calls that may wait."""
    quick: Any
    """For calls that do not wait: a thread that got the lock meanwhile would keep it for 5 ms."""


@lru_cache(maxsize=1)
def load() -> Librdkafka:
    """Return the library of confluent-kafka. Raises what `checked` raises."""
    opened = Librdkafka(ctypes.CDLL(cimpl.__file__), ctypes.PyDLL(cimpl.__file__))
    return checked(opened, confluent_kafka.libversion()[1])


def checked(library: Librdkafka, version: int) -> Librdkafka:
    """Return the library, with the types of all functions declared.

    version: the one that confluent-kafka reports. Raises ClientMissing if a function is missing, and if the library is
    too old or of another version.
    """
    for opened in library:
        if missing := declare(opened):
            raise _unusable(f"has no {', '.join(missing)}")
    own = library.waiting.rd_kafka_version()
    if own < OLDEST or own != version:
        raise _unusable(f"has version {own:#x}, and confluent-kafka expects {version:#x}")
    return library


def declare(library: Any) -> list[str]:
    """Declare the types of all functions; return the names of those that the library does not have."""
    missing = []
    for name, (result, arguments) in FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            missing.append(name)
        else:
            function.restype = result
            function.argtypes = arguments
    return missing


def _unusable(reason: str) -> ClientMissing:
    return ClientMissing(
        f"the library librdkafka of the package 'confluent-kafka' cannot be used: it {reason}",
        remedy="install the package extra 'kafka' again: uv pip install 'cdc[kafka]'",
    )
