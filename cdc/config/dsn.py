"""Syntax check of a DSN without libpq, whose error messages repeat parts of the password."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl, unquote

from cdc.config.names import invalid

SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_URL: Final = re.compile(
    r"postgres(?:ql)?://(?:(?P<user>[^@/?#]*)@)?(?P<host>[^/?#@]*)(?:/(?P<db>[^?#]*))?(?:\?(?P<query>[^#]*))?\Z"
)
_PAIR: Final = re.compile(r"\s*([a-z_]+)\s*=\s*('(?:[^'\\]|\\.)*'|[^\s'\\]*(?:\\.[^\s'\\]*)*)", re.DOTALL)
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


def check_dsn(dsn: str) -> None:
    """Raise a validation error, which repeats no part of the DSN, if libpq would reject it."""
    options = _url_options(dsn) if dsn.startswith(("postgres://", "postgresql://")) else _pairs(dsn)
    if options.get("sslmode", "prefer") not in SSL_MODES:
        raise invalid("unknown sslmode: expected one of {modes}", modes=", ".join(SSL_MODES))


def contains_password(dsn: str) -> bool:
    """Whether a well-formed DSN contains a password."""
    if not dsn.startswith(("postgres://", "postgresql://")):
        return bool(_pairs(dsn).get("password"))
    match = _URL.match(dsn)
    return match is not None and (":" in (match["user"] or "") or bool(_url_options(dsn).get("password")))


def _url_options(dsn: str) -> dict[str, str]:
    if re.search(r"\s", dsn):
        raise invalid("the DSN contains white space: write it as %20")
    if _BAD_ESCAPE.search(dsn):
        raise invalid("the DSN contains a '%' that starts no escape: write it as %25")
    match = _URL.match(dsn)
    if match is None:
        raise invalid("malformed DSN: write @ / ? # in user or password as %40 %2F %3F %23")
    for port in re.findall(r":([^,:\]]*)(?:,|\Z)", re.sub(r"\[[^\]]*\]", "", match["host"])):
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):  # noqa: PLR2004 - of TCP
            raise invalid("invalid port in the DSN: expected a number from 1 to 65535")
    return {name: unquote(value) for name, value in parse_qsl(match["query"] or "", keep_blank_values=True)}


def _pairs(dsn: str) -> dict[str, str]:
    options, at = {}, 0
    while at < len(dsn.rstrip()):
        match = _PAIR.match(dsn, at)
        if match is None or not match[0]:
            raise invalid("malformed DSN: expected postgresql://user@host/database or host=… dbname=…")
        options[match[1]] = match[2].strip("'")
        at = match.end()
    if not options:
        raise invalid("malformed DSN: expected postgresql://user@host/database or host=… dbname=…")
    return options
