"""Files as the tests of the contract use them: a consumer that reads what the progress says is committed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from cdc.config.destinations import FileDelivery
from cdc.delivery.destinations import new_destination
from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.destinations.file import PROGRESS
from tests.delivery.destinations.receivers import Received, Receiver
from tests.delivery.destinations.receivers.kinesis import received_line

CRASH_POINTS: Final = ("file_written", "file_committed")
IDENTITY: Final = DeliveryIdentity("shop", "copy", "0123456789abcdef")


def received(folder: Path) -> list[Received]:
    """Events of the files before the current one, and of its committed part."""
    if not (folder / PROGRESS).exists():
        return [received_line(line) for file in files(folder) for line in file.read_bytes().splitlines()]
    committed = json.loads((folder / PROGRESS).read_bytes())
    current = folder / f"copy-{committed['file']:06}.jsonl"
    contents = [file.read_bytes() for file in files(folder) if file < current]
    contents.append(current.read_bytes()[: committed["length"]])
    return [received_line(line) for content in contents for line in content.splitlines()]


def files(folder: Path) -> list[Path]:
    """The files, in order."""
    return sorted(folder.glob("copy-*.jsonl"))


@contextmanager
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    folder: Path = request.getfixturevalue("tmp_path") / "out"
    # a new file begins after a few batches
    settings = FileDelivery.model_validate({"type": "file", "name": "copy", "path": str(folder), "rotate": "8KiB"})
    yield Receiver(
        partial(new_destination, settings, IDENTITY),
        partial(received, folder),
        ("shop.orders", 'S."ödd" / table?\n'),
        missing={"fences": "a second process is refused while the first one runs"},
        forget_progress=(folder / PROGRESS).unlink,
    )
