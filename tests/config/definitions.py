"""Definitions for tests: one that is right, and a way to write one with a change."""

from pathlib import Path

SOUND = """\
name: shop
source:
  dsn: postgresql://cdc@localhost/shop
tables:
  - match: shop.*
log:
  path: log
sinks:
  - name: lake
    type: delta
    path: lake/{schema}/{table}
"""


def write(directory: Path, text: str | bytes = SOUND, name: str = "shop.yaml") -> Path:
    """A file with the text."""
    path = directory / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def changed(old: str, new: str) -> str:
    """The sound definition with one piece of text put in place of another."""
    assert old in SOUND
    return SOUND.replace(old, new, 1)
