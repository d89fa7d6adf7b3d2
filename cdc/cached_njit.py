"""Compiled functions with a cache on disk: numba's `njit(cache=True)`, made safe against older code in the cache.

After an upgrade of cdc, numba alone can run machine code of the old version, or end with an error:

- numba writes the new index of a function first, then overwrites an old code file of the same name. A process that
  reads the cache between the two writes runs old code. After a kill between the writes, every process runs old code.
- Two processes that compile a function for different argument types choose the same name for their code files, so one
  file overwrites the other.
- numba detects changes only in the file of the function. Classes and constants of other files are compiled in as well.
- The index contains names of classes. After such a class was renamed, the index cannot be read.

This module takes an exclusive file lock for every access to the cache of a package. The first access after a change of
any file of the package removes all earlier code.

Spark gives executors the package as an archive, in another directory for each application. numba would name the cache
after this directory, so that every application compiles again. Here the content of the package names it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from hashlib import sha256
from pathlib import Path, PurePosixPath
from threading import RLock
from typing import Any, Final
from zipfile import ZipFile

import numba
from numba.core.caching import ZipCacheLocator

_ONLY_CACHED: Final = ContextVar("_ONLY_CACHED", default=False)
LOCK_FILE: Final = "cdc-kernels.lock"
"""Name of the lock file in a cache directory; its content is the fingerprint of the compiled package."""
_LOCATORS: Final = (
    "UserProvidedCacheLocator",
    "InTreeCacheLocator",
    "UserWideCacheLocator",
    "IPythonCacheLocator",
    f"{__name__}.ArchiveCacheLocator",
)
"""The classes by which numba finds a cache directory, in its order; the last one replaces numba's own."""
if not numba.config.CACHE_LOCATOR_CLASSES:  # the environment may name others
    numba.config.CACHE_LOCATOR_CLASSES = ",".join(_LOCATORS)


class ArchiveCacheLocator(ZipCacheLocator):  # type: ignore[misc] # numba has no types
    """The cache directory of a function in a zip file, named after the content of its package."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        super().__init__(function, file)
        package = Path(file).parent
        named_by_path = Path(super().get_cache_path())
        self._cache_path = str(named_by_path.with_name(f"{package.name}_{_fingerprint(package)}"))


class FunctionNotCached(Exception):
    """A function would have to be compiled, or wait for another process that compiles, inside `only_cached`."""


@contextmanager
def only_cached() -> Iterator[None]:
    """Raise FunctionNotCached inside the block instead of compiling a function."""
    token = _ONLY_CACHED.set(True)
    try:
        yield
    finally:
        _ONLY_CACHED.reset(token)


def cached_njit(function: Callable[..., Any], **options: Any) -> Any:
    """Return a numba function that compiles on its first call and runs without the GIL.

    The compiled code is cached on disk if a cache directory is writable.
    """
    try:
        dispatcher = numba.njit(nogil=True, cache=True, **options)(function)
        # numba creates the directory for a package in a zip file only when it saves code
        Path(dispatcher.stats.cache_path).mkdir(parents=True, exist_ok=True)
    except (RuntimeError, OSError):  # neither NUMBA_CACHE_DIR, nor the package, nor the user's cache is writable
        dispatcher = numba.njit(nogil=True, **options)(function)
        _guard_compiler(dispatcher)
        return dispatcher
    _guard_compiler(dispatcher)
    cache = _cache_in(Path(dispatcher.stats.cache_path), Path(function.__code__.co_filename).parent)
    load_or_compile = dispatcher.compile

    def load_or_compile_locked(signature: Any) -> Any:
        with cache.lock():
            return load_or_compile(signature)

    dispatcher.compile = load_or_compile_locked
    return dispatcher


def _guard_compiler(dispatcher: Any) -> None:
    """Make the compiler of a function, which numba calls if the cache has no code, obey `only_cached`."""
    compile_now = dispatcher._compiler.compile  # noqa: SLF001 - numba has no public hook between cache and compiler

    def compile_unless_forbidden(*arguments: Any) -> Any:
        if _ONLY_CACHED.get():
            raise FunctionNotCached
        return compile_now(*arguments)

    dispatcher._compiler.compile = compile_unless_forbidden  # noqa: SLF001 - as above


class _PackageCache:
    """The directory with the compiled code of one package, protected by a lock; thread-safe."""

    def __init__(self, path: Path, package: Path) -> None:
        self._path, self._expected = path, _fingerprint(package).encode()
        self._thread_lock = RLock()
        self._depth = 0

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the cache against other threads and processes while the block runs; reentrant in the same thread."""
        with self._thread_lock:
            if self._depth:
                yield
                return
            with (self._path / LOCK_FILE).open("a+b") as file:
                _lock_file(file)
                self._discard_earlier_code(file)
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1

    def _discard_earlier_code(self, file: Any) -> None:
        """Remove all compiled code if the lock file does not contain the fingerprint of the package."""
        file.seek(0)
        if file.read() == self._expected:
            return
        for pattern in ("*.nbi", "*.nbc"):
            for path in self._path.glob(pattern):
                path.unlink(missing_ok=True)
        # last, so that a process that is killed before leaves no fingerprint
        file.truncate(0)
        file.write(self._expected)
        file.flush()


def _lock_file(file: Any) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if _ONLY_CACHED.get() else 0))
    except BlockingIOError:
        raise FunctionNotCached from None


@lru_cache
def _cache_in(path: Path, package: Path) -> _PackageCache:
    return _PackageCache(path, package)


@lru_cache
def _fingerprint(package: Path) -> str:
    """Digest of numba's version and of the name and content of every Python file of a package."""
    digest = sha256(numba.__version__.encode())
    for name, content in _python_files(package):
        digest.update(f"\0{name}\0".encode() + content)
    return digest.hexdigest()


def _python_files(package: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of every Python file of a package, which may be in a zip file."""
    archive = next((path for path in package.parents if path.is_file()), None)
    if archive is None:
        for path in sorted(package.glob("*.py")):
            with suppress(FileNotFoundError):  # removed by an upgrade that is running
                yield path.name, path.read_bytes()
        return
    folder = PurePosixPath(package.relative_to(archive))
    with ZipFile(archive) as opened:
        for member in sorted(opened.namelist()):
            inner = PurePosixPath(member)
            if inner.parent == folder and inner.suffix == ".py":
                yield inner.name, opened.read(member)
