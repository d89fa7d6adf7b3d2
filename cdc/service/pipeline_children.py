"""The child processes of one pipeline, and the warm process that they are forked from."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from cdc.service.warm_process import WarmProcess

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "apply": ("pipelines", "apply"),
    "deliver": ("cdc", "deliver"),
    "reader": ("cdc", "reader"),
    "server": ("cdc", "server"),
}
"""Name of each process → its module and its command."""
KERNELS: Final = "cdc.pgoutput.load_kernels:load_cached_kernels"
KEY_KERNELS: Final = "pipelines.sinks.delta.indexed.load_kernels:load_cached_kernels"
WITHOUT_PANDAS: Final = "cdc.import_guard:refuse_pandas"
WITH_PANDAS: Final = "cdc.import_guard:accept_pandas"
IMPORTS: Final[Mapping[str, tuple[str, ...]]] = {
    "apply": (
        WITH_PANDAS,
        "cdc.cluster.spark_submit_command",
        "pipelines.new_sink_check",
        "pipelines.apply_process",
        KEY_KERNELS,
    ),
    "deliver": (WITHOUT_PANDAS, "cdc.cli.app", "cdc.cli.deliveries", "cdc.delivery.delivery_process"),
    "reader": (WITHOUT_PANDAS, "cdc.cli.app", "cdc.cli.run", "cdc.capture.reader_process", KERNELS),
    "server": (WITHOUT_PANDAS, "cdc.cli.app", "cdc.cli.run", "cdc.service.api.server_process"),
}
"""Name of each process → the modules that it imports when it starts, and functions that it calls (MODULE:FUNCTION)."""


@dataclass(frozen=True, slots=True)
class Child:
    """One process that the supervisor keeps running."""

    name: str
    command: tuple[str, ...]
    may_end: bool = False
    """True if exit status 0 means that the process is done and must not be restarted."""
    imports: tuple[str, ...] = ()
    """Modules that the process imports when it starts; the warm process imports them before it forks the process.

    For an entry MODULE:FUNCTION the warm process also calls the function.

    A child without such modules is started as a program. A child with such modules has a command of the form
    `PYTHON -u -m MODULE ARGUMENT…`.
    """


def pipeline_children(
    config: str, only: Collection[str] = (), *, copies_only: bool = False, delivers: bool = False
) -> list[Child]:
    """Return the child processes of one pipeline, in the order in which the supervisor stops them.

    `only` contains the names of the processes to return; empty means all processes that the pipeline needs. With
    `copies_only`, the supervisor does not restart the reader after exit status 0. delivers: the definition has
    deliveries, so the pipeline needs the process `deliver`.
    """
    wanted = set(only) or {name for name in COMMANDS if name != "deliver" or delivers}
    return [
        Child(
            name,
            (sys.executable, "-u", "-m", *command, "-c", config),
            may_end=copies_only and name == "reader",
            imports=IMPORTS[name],
        )
        for name, command in COMMANDS.items()
        if name in wanted
    ]


def warm_process(only: Collection[str] = ()) -> AbstractContextManager[WarmProcess | None]:
    """Start the warm process of a pipeline with these processes; empty means all processes.

    The warm process imports the modules of the reader first, because the other processes wait for its log. A single
    process would share its memory with none, so it has no warm process; nor has a system other than Linux.
    """
    names = sorted(set(only) or COMMANDS, key=lambda name: (name != "reader", name))
    if len(names) == 1 or sys.platform != "linux":
        return nullcontext()
    return WarmProcess(IMPORTS[names[0]])
