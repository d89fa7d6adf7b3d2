"""JSON values of dates, times and intervals, as Debezium writes them under each `time.precision.mode`.

Texts are what Postgres prints with the settings that `cdc.postgres.connection` pins: ISO dates, UTC, intervals in the
style `postgres`. Whole arrays are converted by Arrow. Only values that Arrow does not know, such as infinity, years BC
or 24:00:00, are converted one by one.

A text that cannot be represented becomes null.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.json_arrays import concatenated, each_distinct

_INFINITIES: Final = ("infinity", "-infinity")
_DATE: Final = re.compile(r"(\d{4,})-(\d\d)-(\d\d)( BC)?", re.ASCII)
_TIME: Final = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?", re.ASCII)
_OFFSET: Final = re.compile(r"([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?", re.ASCII)
_MARCH: Final = 3
_FOUR_DIGITS: Final = 9999
_DAY_MICROS: Final = 86_400_000_000
_INFINITE_DAYS: Final = {"infinity": (-5877611, 6, 21), "-infinity": (-5877611, 6, 22)}
"""What `LocalDate` Debezium's connector takes for infinite dates; the number of days is that of these dates."""
_INFINITE_MICROS: Final = {"infinity": 9_223_372_036_825_200_000, "-infinity": -9_223_372_036_832_400_000}
"""What the JDBC driver takes for infinite timestamps; section "TIMESTAMP type" of Debezium's documentation."""
_INT64: Final = range(-(1 << 63), 1 << 63)
_INT32: Final = range(-(1 << 31), 1 << 31)
_ZONED: Final = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{1,6})?\+00$"
_LOCAL: Final = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{1,6})?$"


def days_of_date(year: int, month: int, day: int) -> int:
    """Return the number of days from 1970-01-01 to a date of the Gregorian calendar; the year 0 is 1 BC."""
    # years begin in March, so that a leap day is the last day of its year
    is_before_march = month < _MARCH
    era, year_of_era = divmod(year - is_before_march, 400)
    day_of_year = (153 * (month + (9 if is_before_march else -3)) + 2) // 5 + day - 1
    return era * 146_097 + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - 719_468


def epoch_days(texts: pa.StringArray) -> pa.StringArray:
    """Return dates as numbers of days."""
    try:
        return texts.cast(pa.date32()).cast(pa.int32()).cast(pa.string())
    except pa.ArrowInvalid:
        return each_distinct(texts, lambda text: str(_days(text)))


def iso_dates(texts: pa.StringArray) -> pa.StringArray:
    """Return dates as `2024-02-29Z`."""
    if _all_match(texts, r"^\d{4}-\d\d-\d\d$"):
        return concatenated(['"', texts, 'Z"'])
    return each_distinct(texts, lambda text: f'"{_iso_date(text)}Z"')


def epoch_micros(texts: pa.StringArray) -> pa.StringArray:
    """Return timestamps as microseconds since 1970."""
    return _timestamps(texts, 1)


def epoch_millis(texts: pa.StringArray) -> pa.StringArray:
    """Return timestamps as milliseconds since 1970, rounded down."""
    return _timestamps(texts, 1000)


def iso_timestamps(texts: pa.StringArray) -> pa.StringArray:
    """Return timestamps without time zone as `2024-02-29T12:30:00.5Z`."""
    if _all_match(texts, _LOCAL):
        return concatenated(['"', pc.utf8_slice_codeunits(texts, 0, 10), "T", pc.utf8_slice_codeunits(texts, 11), 'Z"'])
    return each_distinct(texts, lambda text: _iso_timestamp(text, None))


def zoned_timestamps(digits: int) -> Callable[[pa.StringArray], pa.StringArray]:
    """Return the conversion of timestamps with time zone, with this number of digits of the second's fraction."""

    def convert(texts: pa.StringArray) -> pa.StringArray:
        if not _all_match(texts, _ZONED):
            return each_distinct(texts, lambda text: _iso_timestamp(text, digits))
        parts = ['"', pc.utf8_slice_codeunits(texts, 0, 10), "T", pc.utf8_slice_codeunits(texts, 11, 19)]
        if digits:
            fractions = pc.utf8_slice_codeunits(texts, 20, -3)
            parts += [".", pc.utf8_rpad(fractions, digits, "0")]
        return concatenated([*parts, 'Z"'])

    return convert


def micros_of_day(texts: pa.StringArray) -> pa.StringArray:
    """Return times as microseconds since midnight."""
    return each_distinct(texts, lambda text: str(_micros_of_day(text)))


def millis_of_day(texts: pa.StringArray) -> pa.StringArray:
    """Return times as milliseconds since midnight, rounded down."""
    return each_distinct(texts, lambda text: str(_micros_of_day(text) // 1000))


def iso_times(texts: pa.StringArray) -> pa.StringArray:
    """Return times as `12:30:00.5Z`; 24:00:00 becomes 00:00:00, because the format has no other end of a day."""
    return each_distinct(texts, lambda text: f'"{_iso_time(_micros_of_day(text) % _DAY_MICROS)}Z"')


def zoned_times(texts: pa.StringArray) -> pa.StringArray:
    """Return times with time zone as `10:30:00.5Z`, in UTC."""
    return each_distinct(texts, _zoned_time)


def interval_micros(texts: pa.StringArray) -> pa.StringArray:
    """Return intervals as approximate microseconds, with months of 30.4375 days."""
    return each_distinct(texts, _interval_micros)


def iso_intervals(texts: pa.StringArray) -> pa.StringArray:
    """Return intervals as `P1Y2M3DT4H5M6.78S`."""
    return each_distinct(texts, _iso_interval)


def _all_match(texts: pa.StringArray, pattern: str) -> bool:
    return pc.all(pc.match_substring_regex(texts, pattern), min_count=0).as_py() is not False


def _timestamps(texts: pa.StringArray, divisor: int) -> pa.StringArray:
    try:
        micros = texts.cast(pa.timestamp("us")).cast(pa.int64())
    except pa.ArrowInvalid:
        return each_distinct(texts, lambda text: _fitting(_micros(text) // divisor, _INT64))
    return (micros if divisor == 1 else _floor_divide(micros, divisor)).cast(pa.string())


def _floor_divide(values: pa.Int64Array, divisor: int) -> pa.Int64Array:
    rest = pc.subtract(values, pc.multiply(pc.divide(values, divisor), divisor))
    return pc.subtract(pc.divide(values, divisor), pc.less(rest, 0).cast(pa.int64()))


def _fitting(value: int, allowed: range) -> str:
    if value not in allowed:
        raise ValueError("out of range")
    return str(value)


def _matched(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = pattern.fullmatch(text)
    if found is None:
        raise ValueError("unexpected text")
    return found


def _date_parts(text: str) -> tuple[int, int, int]:
    year, month, day, era = _matched(_DATE, text).groups()
    return 1 - int(year) if era else int(year), int(month), int(day)


def _days(text: str) -> str:
    return _fitting(days_of_date(*(_INFINITE_DAYS.get(text) or _date_parts(text))), _INT32)


def _iso_date(text: str) -> str:
    year, month, day = _INFINITE_DAYS.get(text) or _date_parts(text)
    sign = "+" if year > _FOUR_DIGITS else "-" if year < 0 else ""
    return f"{sign}{abs(year):04}-{month:02}-{day:02}"


def _micros_of_day(text: str) -> int:
    hours, minutes, seconds, fraction = _matched(_TIME, text).groups()
    return (int(hours) * 3600 + int(minutes) * 60 + int(seconds)) * 1_000_000 + int((fraction or "").ljust(6, "0"))


def _split(text: str) -> tuple[str, int, int]:
    """Return the date with its era, the microseconds of the day, and the offset in microseconds."""
    rest, _, era = text.partition(" BC")
    date, _, rest = rest.partition(" ")
    if era:
        raise ValueError("unexpected text")
    time = rest[: len(rest) - len(zone)] if (zone := _zone_text(rest)) else rest
    return date + (" BC" if text.endswith(" BC") else ""), _micros_of_day(time), _offset(zone) if zone else 0


def _zone_text(time: str) -> str:
    at = max(time.rfind("+"), time.rfind("-"))
    return time[at:] if at > 0 else ""


def _offset(text: str) -> int:
    sign, hours, minutes, seconds = _matched(_OFFSET, text).groups()
    total = int(hours) * 3600 + int(minutes or 0) * 60 + int(seconds or 0)
    return (-total if sign == "-" else total) * 1_000_000


def _micros(text: str) -> int:
    if text in _INFINITIES:
        return _INFINITE_MICROS[text]
    date, time, offset = _split(text)
    return days_of_date(*_date_parts(date)) * _DAY_MICROS + time - offset


def _iso_time(micros: int, digits: int | None = None) -> str:
    """Return a time of day; digits: number of digits of the fraction, None for as many as needed."""
    seconds, fraction = divmod(micros, 1_000_000)
    minutes, second = divmod(seconds, 60)
    places = f"{fraction:06}".rstrip("0") if digits is None else f"{fraction:06}"[:digits]
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}{'.' if places else ''}{places}"


def _iso_timestamp(text: str, digits: int | None) -> str:
    if text in _INFINITIES:
        if digits is not None:
            return f'"{text}"'
        raise ValueError("a timestamp without time zone has no infinity in ISO 8601")
    date, time, offset = _split(text)
    if offset:
        raise ValueError("expected UTC")
    return f'"{_iso_date(date)}T{_iso_time(time, digits)}Z"'


def _zoned_time(text: str) -> str:
    zone = _zone_text(text)
    micros = _micros_of_day(text[: len(text) - len(zone)])
    offset = _offset(zone)
    if micros == _DAY_MICROS and not offset:
        return '"24:00:00Z"'
    return f'"{_iso_time((micros - offset) % _DAY_MICROS)}Z"'


_INTERVAL_UNITS: Final = re.compile(r"([+-]?\d+) (year|mon|day)s?(?: |$)", re.ASCII)
_INTERVAL_TIME: Final = re.compile(r"([+-]?)(\d+):(\d\d):(\d\d(?:\.\d+)?)", re.ASCII)


def _interval_parts(text: str) -> tuple[int, int, int, int, int, Decimal]:
    """Return years, months, days, hours, minutes and seconds of an interval in the style `postgres`."""
    units = {"year": 0, "mon": 0, "day": 0}
    at = 0
    while (found := _INTERVAL_UNITS.match(text, at)) is not None:
        units[found[2]] = int(found[1])
        at = found.end()
    hours, minutes, seconds = 0, 0, Decimal(0)
    if at < len(text) or not text:
        sign, hour, minute, second = _matched(_INTERVAL_TIME, text[at:]).groups()
        factor = -1 if sign == "-" else 1
        hours, minutes, seconds = factor * int(hour), factor * int(minute), factor * Decimal(second)
    return units["year"], units["mon"], units["day"], hours, minutes, seconds


def _interval_micros(text: str) -> str:
    years, months, days, hours, minutes, seconds = _interval_parts(text)
    # the same steps in doubles as Debezium's MicroDuration, so the result is rounded in the same way
    total_days = (years * 12 + months) * (365.25 / 12.0) + days
    total_seconds = (((total_days * 24 + hours) * 60) + minutes) * 60 + float(seconds)
    return _fitting(int(total_seconds * 1e6), _INT64)


def _iso_interval(text: str) -> str:
    years, months, days, hours, minutes, seconds = _interval_parts(text)
    places = format(seconds.normalize(), "f") if seconds else "0"
    return f'"P{years}Y{months}M{days}DT{hours}H{minutes}M{places}S"'
