"""Model of the key `verify`: how often and at what cost the server process verifies the sinks."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from cdc.config.field_types import Model, Whole, invalid
from cdc.config.units import SecondsOrOff

_HOURS: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)\Z", re.ASCII)


def _minutes(hours: str) -> tuple[int, int]:
    """Return the first and the last minute of the day of a text such as `22:00-04:30`."""
    found = _HOURS.match(hours)
    if found is None:
        raise invalid("expected two times of the day in UTC, for example 01:00-05:00")
    begin_hour, begin_minute, end_hour, end_minute = map(int, found.groups())
    return begin_hour * 60 + begin_minute, end_hour * 60 + end_minute


def _checked(hours: str) -> str:
    begin, end = _minutes(hours)
    if begin == end:
        raise invalid("the two times are equal, so no time is between them")
    return hours


class Verification(Model):
    """Continuous verification: the server process compares every row of every sink with the source, in passes."""

    every: SecondsOrOff = 86400.0
    """Interval from the start of one pass over a table to the start of the next pass; default 1 day. `off` or 0 turns
    the verification off, and so does `verify: off`."""
    max_cpu: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Maximum share of one core that the verification uses on average here, and its queries at the source."""
    rows_per_second: Annotated[Whole, Field(ge=1)] = 20_000
    """Maximum number of rows that are read from the source per second, on average."""
    between: Annotated[str, AfterValidator(_checked)] | None = None
    """Hours of the day in UTC in which rows are read, for example `22:00-04:30`; default all hours."""

    def is_open(self, now: datetime) -> bool:
        """Return whether rows may be read at this time, which is in UTC."""
        if self.between is None:
            return True
        begin, end = _minutes(self.between)
        minute = now.hour * 60 + now.minute
        return begin <= minute < end if begin < end else minute >= begin or minute < end


def _off(value: Any) -> Any:
    return {"every": 0} if value == "off" else value


class _OrOffInSchema:
    """Adds the value `off` to the JSON schema of a model."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(core_schema), {"const": "off"}]}


VerificationOrOff = Annotated[Verification, BeforeValidator(_off), _OrOffInSchema()]
