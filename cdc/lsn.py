"""Lsn: a byte position in a Postgres write-ahead log, printed as Postgres prints it."""

from __future__ import annotations

import re
from typing import Final, Self

from cdc.errors import MalformedLsn

LSN_BITS: Final = 64
_TEXT: Final = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})\Z", re.ASCII)


class Lsn(int):
    """A WAL position in bytes since the cluster was initialised.

    It is an int, so the difference of two LSNs is a number of bytes. Its text, such as ``16/B374D848``, is the
    high and the low 32 bits in hexadecimal (PostgreSQL manual, section 8.20, ``pg_lsn``).
    """

    __slots__ = ()

    def __new__(cls, value: int = 0) -> Self:
        if not 0 <= value < 1 << LSN_BITS:
            raise MalformedLsn(f"lsn out of range: expected 0 to 2**64 - 1, got {int(value)!r}")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a text such as `16/B374D848`. Raises MalformedLsn for anything else."""
        match = _TEXT.match(text)
        if match is None:
            raise MalformedLsn(f"malformed lsn: expected two hexadecimal numbers as in '16/B374D848', got {text!r}")
        high, low = match.groups()
        return cls(int(high, 16) << 32 | int(low, 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({str(self)!r})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)
