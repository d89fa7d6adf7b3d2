"""A definition whose log was compacted and trimmed, and has a second epoch."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.log.sample_log import build_sample_log


def whole_log_definition(folder: Path) -> Path:
    """The path of a definition in the folder; its log is next to it."""
    path = folder / "pipeline.yaml"
    path.write_text(
        f"name: shop\nsource: {{dsn: 'postgresql://localhost:1/shop'}}\ntables: [{{match: 'shop.*'}}]\n"
        f"log: {{path: '{folder}/log'}}\n"
    )
    shutil.copytree(Path(_prepared().name, "log"), folder / "log")
    return path


@cache
def _prepared() -> TemporaryDirectory[str]:
    """The log in a folder: to write it takes longer than to copy it."""
    folder = TemporaryDirectory()
    build_sample_log(Path(folder.name, "log"))
    return folder
