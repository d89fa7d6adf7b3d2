"""A definition whose log was compacted and trimmed, and has a second epoch."""

from __future__ import annotations

from pathlib import Path

from tests.log.sample_log import build_sample_log


def whole_log_definition(folder: Path) -> Path:
    """The path of a definition in the folder; its log is next to it."""
    path = folder / "pipeline.yaml"
    path.write_text(
        f"name: shop\nsource: {{dsn: 'postgresql://localhost:1/shop'}}\ntables: [{{match: 'shop.*'}}]\n"
        f"log: {{path: '{folder}/log'}}\n"
    )
    build_sample_log(folder / "log")
    return path
