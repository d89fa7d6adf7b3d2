"""Paths in an object store, with the part of the `pathlib.Path` interface that the log uses.

Folders exist implicitly. A write is atomic and durable when the call returns. A missing file raises FileNotFoundError,
as on a disk. Other failures raise LogUnreachable (the store does not answer; retried) or LogInaccessible (the store
denies access, or the bucket does not exist; an operator must act).
"""

from __future__ import annotations

import io
import re
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
"""Connection options under the names that delta-rs and the Rust crate object_store use; some are secret."""

REQUEST_LIMITS: Final[dict[str, str]] = {
    "max_retries": "3",
    "retry_timeout": "20s",
    "timeout": "30s",
    "connect_timeout": "5s",
}
"""Limits of one request; callers that can wait longer retry themselves and report it."""
CLIENT: Final = frozenset({"allow_http", "timeout", "connect_timeout"})
"""Options of the HTTP client, not of the store."""

_URL: Final = re.compile(r"((?:s3a?|gs|abfss?)://[^/]+)/*(.*?)/*\Z")
_MISSING: Final = re.compile(r"NoSuchBucket|ContainerNotFound|specified bucket does not exist")
_REFUSED: Final = re.compile(
    r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|\b40[13] (?:Forbidden|Unauthorized)"
    r"|lacked the necessary privileges|lacked valid authentication|NoCredentials|ExpiredToken"
)
_ANSWERED: Final = re.compile(r"\b4(?!08|09|12|29)\d\d [A-Z]")
_ASKED: Final = re.compile(r"Error performing|Generic (?:S3|GCS|MicrosoftAzure) error|error sending request")
READ_AHEAD_BYTES: Final = 1 << 20
"""Minimum bytes of a partial read: neighbouring columns are usually read next."""
_MARK: Final = ".begun"
"""File whose conditional creation reserves a folder for one writer."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Size and modification time of a file."""

    st_size: int
    st_mtime_ns: int
    """By the store's own clock, whole seconds."""


@dataclass(frozen=True, slots=True)
class BucketPath:
    """A file or a folder of a bucket; equal where the place and the way to it are."""

    bucket: str
    """With its scheme: `s3://lake`."""
    key: str
    """Inside it, without slashes around; empty for the bucket itself."""
    options: Options = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, below: str) -> BucketPath:
        return replace(self, key=f"{self.key}/{below}".strip("/"))

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The last part without its ending."""
        return self.name.rpartition(".")[0] or self.name

    @property
    def parent(self) -> BucketPath:
        """The folder that it lies in."""
        return replace(self, key=self.key.rpartition("/")[0])

    def read_bytes(self) -> bytes:
        """The whole content; raises FileNotFoundError."""
        import obstore

        with self._asking() as store:
            return bytes(obstore.get(store, self.key).bytes())

    def read_text(self, encoding: str = "utf-8") -> str:
        """The whole content; raises FileNotFoundError and UnicodeDecodeError."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: Any) -> None:
        """Put the content (bytes, or an Arrow buffer) in the file's place, durable and in one step."""
        import obstore

        with self._asking() as store:
            obstore.put(store, self.key, obstore.Bytes(memoryview(content).cast("B")))

    def write_text(self, content: str, encoding: str = "utf-8") -> None:
        """Put the text in the file's place, durable and in one step."""
        self.write_bytes(content.encode(encoding))

    def touch(self) -> None:
        """Let the file be there, with a content that it never had before."""
        self.write_bytes(uuid.uuid4().hex.encode())

    def exists(self) -> bool:
        """Whether there is such a file; a folder is none."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether anything lies below."""
        import obstore

        with self._asking() as store:
            return any(obstore.list(store, f"{self.key}/", chunk_size=1))

    def stat(self) -> Stat:
        """Size and time of the file; raises FileNotFoundError."""
        import obstore

        with self._asking() as store:
            found = obstore.head(store, self.key)
        return _stat(found["size"], found["last_modified"])

    def iterdir(self) -> Iterator[BucketPath]:
        """What lies right below: files, and folders that hold any; nothing if there is no such folder."""
        import obstore

        with self._asking() as store:
            found = obstore.list_with_delimiter(store, f"{self.key}/" if self.key else None)
        names = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return (replace(self, key=name.rstrip("/")) for name in names)

    def sizes(self) -> dict[str, int]:
        """Bytes of every file below, at whatever depth, by its path relative to this one; a request per thousand."""
        import obstore

        with self._asking() as store:
            found = [entry for entries in obstore.list(store, f"{self.key}/") for entry in entries]
        return {entry["path"].removeprefix(f"{self.key}/"): entry["size"] for entry in found}

    def glob(self, pattern: str) -> Iterator[BucketPath]:
        """What matches below; each part of the pattern stands for one level."""
        head, _, rest = pattern.partition("/")
        for place in self.iterdir():
            if fnmatchcase(place.name, head):
                yield from place.glob(rest) if rest else (place,)

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:  # noqa: ARG002 - pathlib's words
        """Nothing, unless the folder has to be new: then raises FileExistsError for all but one who asks."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        if exist_ok:
            return
        with self._asking() as store:
            try:
                obstore.put(store, f"{self.key}/{_MARK}", b"", mode="create")
            except AlreadyExistsError:
                raise FileExistsError(str(self)) from None

    def rmdir(self) -> None:
        """Forget whose the folder was; without files it is none."""
        (self / _MARK).unlink(missing_ok=True)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove the file; one that is not there only counts unless missing_ok, for the store does not say."""
        import obstore

        if not missing_ok:
            self.stat()
        with self._asking() as store:
            obstore.delete(store, self.key)

    def remove_all(self) -> None:
        """Remove everything below."""
        import obstore

        with self._asking() as store:
            for entries in obstore.list(store, f"{self.key}/"):
                obstore.delete(store, [entry["path"] for entry in entries])

    def reader(self, size: int | None = None) -> io.BufferedReader:
        """The file for random access: only what is asked for is fetched; raises FileNotFoundError.

        size: of the file, where it is known.
        """
        return io.BufferedReader(_Ranges(self, self.stat().st_size if size is None else size), READ_AHEAD_BYTES)

    def read_range(self, start: int, length: int) -> Any:
        """A part of the content, as a buffer."""
        import obstore

        with self._asking() as store:
            return obstore.get_range(store, self.key, start=start, length=length)

    @contextmanager
    def _asking(self) -> Iterator[ObjectStore]:
        with storage_errors(self):
            yield _store(self.bucket, self.options)


class _Ranges(io.RawIOBase):
    """A file of a bucket, of which each read is a request."""

    def __init__(self, place: BucketPath, size: int) -> None:
        self._place, self._size, self._at = place, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        buffer[:length] = self._place.read_range(self._at, length)
        self._at += length
        return length


Root = Path | BucketPath
"""Root directory of a log, on a disk or in an object store."""


def as_root(place: str | Root, options: Options = ()) -> Root:
    """The root for a path, a `file://` URL, or the URL of an object store."""
    if not isinstance(place, str):
        return place
    url = _URL.match(place)
    if url is not None:
        return BucketPath(url[1].replace("s3a://", "s3://"), url[2], options)
    return Path(place.removeprefix("file://"))


def has_conditional_create(folder: BucketPath) -> bool:
    """Test all permissions that a log needs, and return whether the store fails the second creation of a file.

    Raises LogUnreachable and LogInaccessible.
    """
    probe = folder / f"_probe-{uuid.uuid4().hex}"
    try:
        probe.mkdir()
        probe.mkdir()
    except FileExistsError:
        return list(probe.iterdir()) == [probe / _MARK] and (probe / _MARK).read_bytes() == b""
    finally:
        probe.remove_all()
    return False


def options_of(place: Root) -> dict[str, str] | None:
    """For delta-rs; None for a directory."""
    return {**REQUEST_LIMITS, **dict(place.options)} if isinstance(place, BucketPath) else None


@contextmanager
def storage_errors(place: Root) -> Iterator[None]:
    """Convert errors of an object store inside the block to LogError; errors of a directory pass unchanged."""
    try:
        yield
    except (LogError, FileExistsError):
        raise
    except Exception as exc:
        if isinstance(place, BucketPath) and (known := _known(exc, place)) is not None:
            raise known from exc
        raise


def _known(exc: Exception, place: BucketPath) -> LogError | None:
    text = str(exc)
    if _MISSING.search(text):
        return LogInaccessible(
            f"bucket {place.bucket!r} does not exist", remedy="create the bucket, or correct log.path and log.storage"
        )
    if isinstance(exc, FileNotFoundError):
        return None
    if _REFUSED.search(text) or type(exc).__name__ in {"PermissionDeniedError", "UnauthenticatedError"}:
        return LogInaccessible(f"access to {place.bucket!r} is denied")
    if not _ASKED.search(text):
        return None
    if (answer := _ANSWERED.search(text)) is not None:
        return LogInaccessible(f"the object store rejects a request to {place.bucket!r} with status {answer[0][:3]}")
    return LogUnreachable(f"the object store of {place.bucket!r} does not answer, or asks the client to retry later")


def _stat(size: int, changed: datetime) -> Stat:
    return Stat(size, int(changed.timestamp()) * 1_000_000_000)


@cache
def _store(bucket: str, options: Options) -> ObjectStore:
    from obstore.store import from_url

    said = {**REQUEST_LIMITS, **dict(options)}
    retries: dict[str, Any] = {
        "max_retries": int(said.pop("max_retries")),
        "retry_timeout": timedelta(seconds=int(said.pop("retry_timeout").removesuffix("s"))),
    }
    client: dict[str, Any] = {key: said.pop(key) for key in CLIENT & said.keys()}
    opened: Callable[..., ObjectStore] = from_url
    return opened(bucket, config=said, client_options=client, retry_config=retries)
