"""Sends the driver's code to the Python workers of executors, and recognises errors that such workers raised.

Executors get the packages cdc and pipelines from the driver, so that both run the same version. Their dependencies,
such as pyarrow and deltalake, are not sent: they must be installed where executors run.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import cdc
import pipelines
from cdc.errors import LogCorrupt

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ARCHIVE: Final = "cdc-code.zip"
_PACKAGES: Final = (cdc, pipelines)
_LOG_CORRUPT: Final = re.compile(r"LogCorrupt: ([^\n]+)")


def ship(session: SparkSession) -> None:
    """Send cdc and pipelines to the executors of a session, once per session.

    Nothing is sent if this process imports the packages from an archive: `--py-files` has then sent that archive to all
    executors.
    """
    context = session.sparkContext
    packages = [Path(package.__file__ or "").parent for package in _PACKAGES]
    if all(package.is_dir() for package in packages) and not any(ARCHIVE in file for file in context.listFiles):
        folder = Path(tempfile.mkdtemp(prefix="cdc-code-"))
        # executors that start later fetch it as well
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        context.addPyFile(str(build_archive(packages, folder / ARCHIVE)))


def build_archive(folders: list[Path], archive: Path) -> Path:
    """Write the packages to a zip archive from which Python can import; the same files give the same bytes."""
    with ZipFile(archive, "w", ZIP_DEFLATED) as zipped:
        for folder in folders:
            for file in sorted(folder.rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    zipped.writestr(ZipInfo(str(file.relative_to(folder.parent))), file.read_bytes(), ZIP_DEFLATED)
    return archive


def worker_error(exc: BaseException) -> LogCorrupt | None:
    """Return the LogCorrupt that a worker raised, from its text in Spark's exception `exc`; None for another error."""
    found = _LOG_CORRUPT.search(str(exc))
    return None if found is None else LogCorrupt(found[1])
