"""Into: the directory in which a replay keeps a new target apart from its sink."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
import pyarrow.fs as pafs

from cdc.config.field_types import fixed_part, placeholders
from cdc.errors import ConfigError

UNFINISHED: Final = "_unfinished_replay"
"""File in the directory while it is being filled: a run after a crash may begin anew there, and only there."""


def table_template(path: str) -> str:
    """A Delta sink's template from what a person wrote: a template, or the directory of all tables."""
    whole = absolute_path(path)
    return whole if "table" in placeholders(whole) else f"{whole}/{{schema}}/{{table}}"


def absolute_path(path: str) -> str:
    """A local path made absolute against the working directory; a URI as it is."""
    return path if "://" in path else os.path.abspath(path)  # noqa: PTH100 - Path would fold the slashes of a URI


def check_directory(path: str, owner: str) -> None:
    """Raise ConfigError unless the directory is missing, empty, or left by a replay of `owner` that was killed."""
    system, base = _open_filesystem(path)
    if system.get_file_info(base).type == pafs.FileType.File:
        raise ConfigError(f"--into {path!r} is a file", remedy="name a directory that does not exist yet")
    if _entries(system, base) and _read_owner(system, base) != owner:
        raise ConfigError(
            f"--into {path!r} is not empty", remedy="name a directory that does not exist yet or is empty"
        )


@contextmanager
def fill_directory(path: str, owner: str) -> Iterator[None]:
    """The directory, empty, to be filled inside the block; it counts as unfinished until the block ended well.

    Raises ConfigError as check_into.
    """
    check_directory(path, owner)
    system, base = _open_filesystem(path)
    system.create_dir(base, recursive=True)
    for entry in _entries(system, base):
        if entry.base_name != UNFINISHED:  # it goes last: without it what is left would belong to nobody
            (system.delete_dir if entry.type == pafs.FileType.Directory else system.delete_file)(entry.path)
    with system.open_output_stream(f"{base}/{UNFINISHED}") as marker:
        marker.write(owner.encode())
    yield
    system.delete_file(f"{base}/{UNFINISHED}")


def _open_filesystem(path: str) -> tuple[pafs.FileSystem, str]:
    system, base = pafs.FileSystem.from_uri(fixed_part(absolute_path(path)))
    return system, base


def _entries(system: pafs.FileSystem, base: str) -> list[pafs.FileInfo]:
    return list(system.get_file_info(pafs.FileSelector(base, allow_not_found=True)))


def _read_owner(system: pafs.FileSystem, base: str) -> str | None:
    try:
        with system.open_input_stream(f"{base}/{UNFINISHED}") as marker:
            return bytes(marker.read()).decode()
    except (FileNotFoundError, pa.ArrowException):
        return None
