"""Paths in an object store, with the part of the `pathlib.Path` interface that cdc uses.

Folders exist implicitly. A write is atomic and durable when the call returns. A missing file raises FileNotFoundError,
as on a disk. Other failures raise LogUnreachable or LogInaccessible. LogUnreachable means that the store does not
answer, and the caller tries again. LogInaccessible means that the store denies access or the bucket does not exist, and
an operator must act.
"""

from __future__ import annotations

import io
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cdc.errors import LogError, LogInaccessible, LogUnreachable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

Options = tuple[tuple[str, str], ...]
"""Connection options of an object store as (name, value) pairs; some values are secret.

The names are those that delta-rs and the Rust crate object_store use.
"""

REQUEST_LIMITS: Final[dict[str, str]] = {
    "max_retries": "3",
    "retry_timeout": "20s",
    "timeout": "30s",
    "connect_timeout": "5s",
}
"""Time limits and number of retries of one request. A caller that can wait longer repeats the request."""
CLIENT: Final = frozenset({"allow_http", "timeout", "connect_timeout"})
"""Names of the options of the HTTP client; all other options belong to the store."""

_URL: Final = re.compile(r"((?:s3a?|gs|abfss?)://[^/]+)/*(.*?)/*\Z")
_MISSING: Final = re.compile(r"NoSuchBucket|ContainerNotFound|specified bucket does not exist")
_REFUSED: Final = re.compile(
    r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|\b40[13] (?:Forbidden|Unauthorized)"
    r"|lacked the necessary privileges|lacked valid authentication|NoCredentials|ExpiredToken"
)
_CLIENT_ERROR: Final = re.compile(r"\b4(?!08|09|12|29)\d\d [A-Z]")
_REQUEST_FAILED: Final = re.compile(r"Error performing|Generic (?:S3|GCS|MicrosoftAzure) error|error sending request")
READ_AHEAD_BYTES: Final = 1 << 20
"""Minimum number of bytes of one partial read, because the next column is usually read as well."""
_RESERVATION: Final = ".begun"
"""Name of the file that reserves a folder: a writer owns the folder if its conditional put has created the file."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Size and modification time of a file."""

    st_size: int
    st_mtime_ns: int
    """Time of the last write according to the store's clock, in nanoseconds, rounded down to a whole second."""


@dataclass(frozen=True, slots=True)
class BucketPath:
    """A file or a folder of a bucket; two paths are equal if bucket, key and options are equal."""

    bucket: str
    """URL of the bucket with the scheme, such as `s3://lake`."""
    key: str
    """Key inside the bucket, without slashes at both ends; "" for the whole bucket."""
    options: Options = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, below: str) -> BucketPath:
        return replace(self, key=f"{self.key}/{below}".strip("/"))

    @property
    def name(self) -> str:
        """The part of the key after the last slash."""
        return self.key.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The name without its last suffix."""
        return self.name.rpartition(".")[0] or self.name

    @property
    def parent(self) -> BucketPath:
        """The folder that contains this file or folder."""
        return replace(self, key=self.key.rpartition("/")[0])

    def read_bytes(self) -> bytes:
        """Return the content of the file; raises FileNotFoundError."""
        import obstore

        with self._client() as store:
            return bytes(obstore.get(store, self.key).bytes())

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the content of the file as text; raises FileNotFoundError and UnicodeDecodeError."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: Any) -> None:
        """Create or replace the file with the content (bytes or an Arrow buffer), atomically and durably."""
        import obstore

        with self._client() as store:
            obstore.put(store, self.key, obstore.Bytes(memoryview(content).cast("B")))

    def create_bytes(self, content: bytes) -> None:
        """Create the file with the content, atomically and durably; raises FileExistsError if it exists."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._client() as store:
            try:
                obstore.put(store, self.key, content, mode="create")
            except AlreadyExistsError:
                raise FileExistsError(str(self)) from None

    def write_text(self, content: str, encoding: str = "utf-8") -> None:
        """Create or replace the file with the text, atomically and durably."""
        self.write_bytes(content.encode(encoding))

    def touch(self) -> None:
        """Create or replace the file with a new random content, so that other processes notice each call."""
        self.write_bytes(uuid.uuid4().hex.encode())

    def exists(self) -> bool:
        """Return True if the file exists; False for a folder."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Return True if the folder contains a file at any depth."""
        import obstore

        with self._client() as store:
            return any(obstore.list(store, f"{self.key}/", chunk_size=1))

    def stat(self) -> Stat:
        """Return size and modification time of the file; raises FileNotFoundError."""
        import obstore

        with self._client() as store:
            found = obstore.head(store, self.key)
        return _stat(found["size"], found["last_modified"])

    def iterdir(self) -> Iterator[BucketPath]:
        """Yield the files and non-empty folders directly in this folder; nothing if the folder does not exist."""
        import obstore

        with self._client() as store:
            found = obstore.list_with_delimiter(store, f"{self.key}/" if self.key else None)
        names = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return (replace(self, key=name.rstrip("/")) for name in names)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file below this folder at any depth, by path relative to the folder.

        The listing needs one request per thousand files.
        """
        import obstore

        with self._client() as store:
            found = [entry for entries in obstore.list(store, f"{self.key}/") for entry in entries]
        return {entry["path"].removeprefix(f"{self.key}/"): entry["size"] for entry in found}

    def glob(self, pattern: str) -> Iterator[BucketPath]:
        """Yield the paths below this folder that match `pattern`; each component of the pattern matches one level."""
        head, _, rest = pattern.partition("/")
        for place in self.iterdir():
            if fnmatchcase(place.name, head):
                yield from place.glob(rest) if rest else (place,)

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:  # noqa: ARG002 - pathlib's signature
        """Reserve this folder for one writer; with `exist_ok` do nothing, because folders exist implicitly.

        Without `exist_ok` only the first caller succeeds, and all others get FileExistsError.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        if exist_ok:
            return
        with self._client() as store:
            try:
                obstore.put(store, f"{self.key}/{_RESERVATION}", b"", mode="create")
            except AlreadyExistsError:
                raise FileExistsError(str(self)) from None

    def rmdir(self) -> None:
        """Remove the reservation file of the folder. If the folder contains no other file, it no longer exists."""
        (self / _RESERVATION).unlink(missing_ok=True)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove the file.

        Unless `missing_ok` is True, a missing file raises FileNotFoundError, and a second request checks whether the
        file exists.
        """
        import obstore

        if not missing_ok:
            self.stat()
        with self._client() as store:
            obstore.delete(store, self.key)

    def remove_all(self) -> None:
        """Remove every file below this folder."""
        import obstore

        with self._client() as store:
            for entries in obstore.list(store, f"{self.key}/"):
                obstore.delete(store, [entry["path"] for entry in entries])

    def reader(self, size: int | None = None) -> io.BufferedReader:
        """Open the file for random access; only the ranges that are read are fetched.

        Pass `size`, the size of the file in bytes, if it is known; this saves a request. Raises FileNotFoundError.
        """
        return io.BufferedReader(_RangeReader(self, self.stat().st_size if size is None else size), READ_AHEAD_BYTES)

    def read_range(self, start: int, length: int) -> Any:
        """Return `length` bytes of the file from the offset `start`, as a buffer."""
        import obstore

        with self._client() as store:
            return obstore.get_range(store, self.key, start=start, length=length)

    @contextmanager
    def _client(self) -> Iterator[ObjectStore]:
        with storage_errors(self):
            yield _store(self.bucket, self.options)


class _RangeReader(io.RawIOBase):
    """A file of a bucket for random access; each read is one request."""

    def __init__(self, path: BucketPath, size: int) -> None:
        self._path, self._size, self._offset = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._offset = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size}[whence]
        return self._offset

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._offset)
        if length <= 0:
            return 0
        buffer[:length] = self._path.read_range(self._offset, length)
        self._offset += length
        return length


Root = Path | BucketPath
"""A file or a folder on a disk or in an object store, such as the root directory of a log."""


def as_root(place: str | Root, options: Options = ()) -> Root:
    """Return the path object for a local path, a `file://` URL or the URL of an object store.

    A `place` that is already a path object is returned unchanged.
    """
    if not isinstance(place, str):
        return place
    url = _URL.match(place)
    if url is not None:
        return BucketPath(url[1].replace("s3a://", "s3://"), url[2], options)
    return Path(place.removeprefix("file://"))


def remove_folder(folder: Root) -> None:
    """Remove a folder with all files below it; a folder that does not exist is no error."""
    if isinstance(folder, BucketPath):
        folder.remove_all()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def has_conditional_create(folder: BucketPath) -> bool:
    """Test all permissions that a log needs, and return True if the store refuses to create a file twice.

    The test creates and removes a file below `folder`. Raises LogUnreachable if the store does not answer. Raises
    LogInaccessible if a permission or the bucket is missing.
    """
    probe = folder / f"_probe-{uuid.uuid4().hex}"
    try:
        probe.mkdir()
        probe.mkdir()
    except FileExistsError:
        return list(probe.iterdir()) == [probe / _RESERVATION] and (probe / _RESERVATION).read_bytes() == b""
    finally:
        probe.remove_all()
    return False


def options_of(place: Root) -> dict[str, str] | None:
    """Return the storage options for delta-rs; None for a local directory."""
    return {**REQUEST_LIMITS, **dict(place.options)} if isinstance(place, BucketPath) else None


@contextmanager
def storage_errors(place: Root) -> Iterator[None]:
    """Run the block, and raise an error of the object store as LogUnreachable or LogInaccessible.

    Errors pass unchanged if `place` is a local directory.
    """
    try:
        yield
    except (LogError, FileExistsError):
        raise
    except Exception as exc:
        if isinstance(place, BucketPath) and (known := _log_error(exc, place)) is not None:
            raise known from exc
        raise


def _log_error(exc: Exception, place: BucketPath) -> LogError | None:
    text = str(exc)
    if _MISSING.search(text):
        return LogInaccessible(
            f"bucket {place.bucket!r} does not exist", remedy="create the bucket, or correct log.path and log.storage"
        )
    if isinstance(exc, FileNotFoundError):
        return None
    if _REFUSED.search(text) or type(exc).__name__ in {"PermissionDeniedError", "UnauthenticatedError"}:
        return LogInaccessible(f"the object store denies access to bucket {place.bucket!r}")
    if not _REQUEST_FAILED.search(text):
        return None
    if (status := _CLIENT_ERROR.search(text)) is not None:
        return LogInaccessible(
            f"the object store rejects a request to bucket {place.bucket!r} with status {status[0][:3]}"
        )
    return LogUnreachable(f"the object store of bucket {place.bucket!r} does not answer, or asks cdc to retry later")


def _stat(size: int, changed: datetime) -> Stat:
    return Stat(size, int(changed.timestamp()) * 1_000_000_000)


@cache
def _store(bucket: str, options: Options) -> ObjectStore:
    from obstore.store import from_url

    config = {**REQUEST_LIMITS, **dict(options)}
    retries: dict[str, Any] = {
        "max_retries": int(config.pop("max_retries")),
        "retry_timeout": timedelta(seconds=int(config.pop("retry_timeout").removesuffix("s"))),
    }
    client: dict[str, Any] = {key: config.pop(key) for key in CLIENT & config.keys()}
    create: Callable[..., ObjectStore] = from_url
    return create(bucket, config=config, client_options=client, retry_config=retries)
