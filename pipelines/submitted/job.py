"""The script that spark-submit starts on a cluster: `job.py VERB -c FILE` runs a verb of `python -m pipelines`."""

from __future__ import annotations

import sys

from cdc.logging_setup import configure_by_environment
from pipelines.__main__ import main


def job() -> None:
    """Run the verb of the command line. A failure raises SystemExit; a success returns, as schedulers expect."""
    configure_by_environment()
    if status := main(submitted=True):
        sys.exit(status)


if __name__ == "__main__":
    job()
