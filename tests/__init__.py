"""Tests of the product, on real servers."""

from __future__ import annotations

import os
import sys

# every worker compiles Hypothesis and 800 test modules, and every command under test compiles the product, unless
# bytecode is kept; said here, because this package is imported before all of them
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
