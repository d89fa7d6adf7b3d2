"""Runs the demo's pipeline processes under the same supervisor as `cdc run`, with their output in files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Final, Self

from cdc.demo.workspace import Workspace
from cdc.errors import CdcError, ChildFailed
from cdc.service.pipeline_children import Child, pipeline_children
from cdc.service.supervisor import Supervisor
from cdc.service.warm_process import WarmProcess

MAX_RESTARTS: Final = 4
"""Number of restarts of one process after which the demo ends with an error."""


class DemoProcesses:
    """Context manager that runs child processes; its exit stops them, or kills them after a KeyboardInterrupt."""

    def __init__(self, workspace: Workspace, children: Sequence[Child], warm: WarmProcess | None = None) -> None:
        """`warm` is the process from which the children are forked."""
        self._workspace = workspace
        self._supervisor = Supervisor(children, say=self._append_output, warm=warm)
        self._failure: CdcError | None = None
        self._thread = Thread(target=self._run, name="supervisor")

    @classmethod
    def of_pipeline(cls, workspace: Workspace, names: Sequence[str], warm: WarmProcess | None) -> Self:
        """Return these processes of the demo's pipeline, forked from `warm` if it is not None."""
        return cls(workspace, pipeline_children(str(workspace.definition), names), warm)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            return self.kill()
        self._supervisor.stop()
        self._thread.join()
        return None

    def kill(self) -> None:
        """Kill all processes at once, even in the middle of a batch."""
        self._supervisor.stop()
        self._supervisor.stop()  # the second request kills at once
        self._thread.join()

    def check(self) -> None:
        """Raise ChildFailed if the supervisor failed or has restarted a child too often."""
        if self._failure is not None:
            raise self._failure
        for process, restarts in self._supervisor.restarts.items():
            if restarts >= MAX_RESTARTS:
                output = self._workspace.output(process)
                raise ChildFailed(
                    f"{process} failed {restarts} times: {last_line(output)}", remedy=f"read the output in {output}"
                )

    def _run(self) -> None:
        try:
            self._supervisor.run()
        except CdcError as error:
            self._failure = error

    def _append_output(self, process: str, line: str) -> None:
        with self._workspace.output(process).open("a") as output:
            output.write(f"{line}\n")


def pipelines_command(verb: str, definition: Path, *options: str) -> Sequence[str]:
    """Return the command line of a subcommand of `python -m pipelines`."""
    return [sys.executable, "-m", "pipelines", verb, "-c", str(definition), *options]


def last_line(output: Path) -> str:
    """Return the last non-blank line of a process's output file, cut to 200 characters."""
    if not output.exists():
        return "the process printed nothing"
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "the process printed nothing"
