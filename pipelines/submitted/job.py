"""`spark-submit … pipelines/submitted/job.py VERB -c FILE`: `python -m pipelines`, in a session that was submitted."""

from __future__ import annotations

import sys

from cdc.process_logs import configure_by_environment
from pipelines.__main__ import main


def job() -> None:
    """Run the verb of the command line; raises SystemExit unless all went well, as schedulers want to hear it."""
    configure_by_environment()
    if status := main(submitted=True):
        sys.exit(status)


if __name__ == "__main__":
    job()
