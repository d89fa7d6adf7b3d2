"""Import guard: keeps pandas out of a process that does not need it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Final


class _WithoutPandas(MetaPathFinder):
    """Makes each import of pandas fail."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        del path, target
        if fullname == "pandas":
            raise ModuleNotFoundError("this process does not load pandas", name=fullname)


_WITHOUT_PANDAS: Final = _WithoutPandas()


def refuse_pandas() -> None:
    """Make the import of pandas fail from now on, as if it was not installed.

    PySpark requires pandas, and pyarrow imports an installed one with the first array. That takes 0.25 s and 35 MiB,
    and only a process with Spark uses it.
    """
    if _WITHOUT_PANDAS not in sys.meta_path:
        sys.meta_path.insert(0, _WITHOUT_PANDAS)


def accept_pandas() -> None:
    """Undo `refuse_pandas`, for a process that was forked from one without pandas."""
    with suppress(ValueError):
        sys.meta_path.remove(_WITHOUT_PANDAS)
