"""`python -m tests.run_code CODE ARGUMENT…`: as `python -c CODE ARGUMENT…`, for processes that are forked."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    _, code, *sys.argv[1:] = sys.argv
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
