"""Shipping: the driver's own code on its way to the executors of a cluster, so that both run the same version.

What that code needs, pyarrow and deltalake among it, has to be installed where executors run: none of it is sent.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Final
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from pyspark.sql import SparkSession

import cdc
import pipelines

ARCHIVE: Final = "cdc-code.zip"
_PACKAGES: Final = (cdc, pipelines)


def ship(session: SparkSession) -> None:
    """Let the executors of a session import cdc and pipelines as this process does; once per session.

    Nothing is sent where this process has them from an archive itself: `--py-files` has brought that to all.
    """
    context = session.sparkContext
    folders = [Path(package.__file__ or "").parent for package in _PACKAGES]
    if all(folder.is_dir() for folder in folders) and not any(ARCHIVE in file for file in context.listFiles):
        made = Path(tempfile.mkdtemp(prefix="cdc-code-"))
        # executors that come later ask for it as well
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        context.addPyFile(str(packed(folders, made / ARCHIVE)))


def packed(folders: list[Path], archive: Path) -> Path:
    """The packages as an archive that Python imports from; of the same files the same bytes."""
    with ZipFile(archive, "w", ZIP_DEFLATED) as zipped:
        for folder in folders:
            for file in sorted(folder.rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    zipped.writestr(ZipInfo(str(file.relative_to(folder.parent))), file.read_bytes(), ZIP_DEFLATED)
    return archive
