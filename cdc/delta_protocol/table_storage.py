"""Table storage: the files below a Delta table's directory, on a disk or in an object store, by their relative paths.

`create_durably` and `replace` sync what they write. Files of the other methods are synced by the caller, as those of
delta-rs and Spark are.
"""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake.fs import DeltaStorageHandler

from cdc import atomic_file
from cdc.bucket_files import BucketPath


class TableStorage(ABC):
    """Reads and creates files of one table."""

    @property
    @abstractmethod
    def file_system(self) -> pafs.FileSystem:
        """A file system whose root is the table's directory, for pyarrow."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the content of a file; raises FileNotFoundError."""

    @abstractmethod
    def write(self, path: str, content: bytes | pa.Buffer) -> None:
        """Write a new file with a name that nothing else uses."""

    @abstractmethod
    def create(self, path: str, content: bytes | pa.Buffer) -> None:
        """Write a file atomically, unless it exists; raises FileExistsError if it exists."""

    @abstractmethod
    def create_durably(self, path: str, content: bytes | pa.Buffer) -> None:
        """Write a file as `create` does; it survives a loss of power once the call has returned."""

    @abstractmethod
    def identity(self, path: str) -> tuple[float, ...] | None:
        """Return values that differ for another file of the same path; None if the file does not exist."""

    @abstractmethod
    def replace(self, path: str, content: bytes | pa.Buffer) -> None:
        """Replace a file atomically and durably."""

    @abstractmethod
    def list(self, folder: str) -> Iterator[str]:
        """Yield the paths of the files directly in a folder, not of those in its subfolders."""

    @abstractmethod
    def make_folder(self, folder: str) -> None:
        """Create a folder of the table durably unless it exists; `create` and `replace` require that it exists."""

    def exists(self, path: str) -> bool:
        """Return whether a file exists."""
        return bool(self.file_system.get_file_info(path).type == pafs.FileType.File)

    def is_gone(self, path: str) -> bool:  # noqa: ARG002 - a disk looks at the path
        """Return whether a file no longer exists. An object store is not asked, because that takes milliseconds."""
        return False

    def open(self, path: str) -> Any:
        """Open a file for pyarrow."""
        return self.file_system.open_input_file(path)

    @contextmanager
    def open_new(self, path: str) -> Iterator[Any]:
        """Open a new file, with a name that nothing else uses, to which pyarrow writes in parts during the block.

        An exception in the block removes the file.
        """
        try:
            with self.file_system.open_output_stream(path, compression=None) as file:
                yield file
        except BaseException:
            with suppress(OSError):
                self.file_system.delete_file(path)
            raise


class LocalStorage(TableStorage):
    """A table's directory on a disk."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @cached_property
    def file_system(self) -> pafs.FileSystem:
        """See TableStorage.file_system."""
        return pafs.SubTreeFileSystem(str(self._root), pafs.LocalFileSystem(use_mmap=True))

    def read(self, path: str) -> bytes:
        """See TableStorage.read."""
        return (self._root / path).read_bytes()

    def write(self, path: str, content: bytes | pa.Buffer) -> None:
        """See TableStorage.write."""
        try:
            file = (self._root / path).open("wb")
        except FileNotFoundError:
            (self._root / path).parent.mkdir(exist_ok=True)
            file = (self._root / path).open("wb")
        with file:
            file.write(content)

    def create(self, path: str, content: bytes | pa.Buffer) -> None:
        """See TableStorage.create."""
        file = self._root / path
        draft = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
        try:
            draft.write_bytes(content)
            atomic_file.link(draft, file)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def create_durably(self, path: str, content: bytes | pa.Buffer) -> None:
        """See TableStorage.create_durably."""
        atomic_file.create(self._root / path, bytes(content))

    def identity(self, path: str) -> tuple[float, ...] | None:
        """See TableStorage.identity."""
        try:
            found = (self._root / path).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def replace(self, path: str, content: bytes | pa.Buffer) -> None:
        """See TableStorage.replace."""
        atomic_file.replace(self._root / path, bytes(content))

    def is_gone(self, path: str) -> bool:
        """See TableStorage.is_gone."""
        return not (self._root / path).exists()

    def list(self, folder: str) -> Iterator[str]:
        """See TableStorage.list."""
        with suppress(FileNotFoundError), os.scandir(self._root / folder) as found:
            for entry in found:
                if entry.is_file():
                    yield f"{folder}/{entry.name}"

    def make_folder(self, folder: str) -> None:
        """See TableStorage.make_folder."""
        atomic_file.make_directory(self._root / folder)


class BucketStorage(TableStorage):
    """A table's directory in an object store; access is configured by the environment, as for delta-rs."""

    def __init__(self, root: BucketPath) -> None:
        self._root = root

    @cached_property
    def file_system(self) -> pafs.FileSystem:
        """See TableStorage.file_system."""
        return pafs.PyFileSystem(DeltaStorageHandler(str(self._root)))

    def read(self, path: str) -> bytes:
        """See TableStorage.read."""
        return (self._root / path).read_bytes()

    def write(self, path: str, content: bytes | pa.Buffer) -> None:
        """See TableStorage.write."""
        (self._root / path).write_bytes(content)

    def create(self, path: str, content: bytes | pa.Buffer) -> None:
        """See TableStorage.create. A file with the same content is no error.

        If the reply of the store was lost, the client sends the request again and finds the file that it created.
        """
        content = bytes(content)
        try:
            (self._root / path).create_bytes(content)
        except FileExistsError:
            if self.read(path) != content:
                raise

    def create_durably(self, path: str, content: bytes | pa.Buffer) -> None:
        """See TableStorage.create_durably."""
        self.create(path, content)

    def identity(self, path: str) -> tuple[float, ...] | None:
        """See TableStorage.identity."""
        try:
            found = (self._root / path).stat()
        except FileNotFoundError:
            return None
        return found.st_size, found.st_mtime_ns

    def replace(self, path: str, content: bytes | pa.Buffer) -> None:
        """See TableStorage.replace."""
        (self._root / path).write_bytes(content)

    def list(self, folder: str) -> Iterator[str]:
        """See TableStorage.list."""
        for file in (self._root / folder).iterdir():
            yield f"{folder}/{file.name}"

    def make_folder(self, folder: str) -> None:
        """Do nothing, because folders of an object store exist implicitly."""


def storage_of(uri: str) -> TableStorage:
    """Return the storage of the table at `uri`."""
    if "://" not in uri:
        return LocalStorage(Path(uri))
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    # obstore reads the credentials and the endpoint from the environment, as delta-rs does, but not this option
    allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true", "yes", "on"}
    options = (("allow_http", "true"),) if allowed else ()
    return BucketStorage(BucketPath(f"{scheme}://{bucket}", key.strip("/"), options))
