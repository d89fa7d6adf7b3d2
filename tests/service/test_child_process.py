"""A child ends with its parent, and its whole group with it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from cdc.service.child_process import kill_group
from tests.fixtures import forked

WAIT = "import signal; print('up', flush=True); signal.pause()"
PARENT = f"""
import subprocess, sys
from cdc.service.child_process import die_with_parent
child = subprocess.Popen([sys.executable, "-c", {WAIT!r}], stdout=subprocess.PIPE, preexec_fn=die_with_parent())
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""
GRANDCHILD = """
import os
from cdc.service.child_process import die_with_parent
end_with_parent = die_with_parent()
if os.fork() == 0:
    if os.fork() == 0:
        print("before", flush=True)
        end_with_parent()
        print("after", flush=True)
    os._exit(0)
os.wait()
"""
GROUP = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {WAIT!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def ends(pidfd: int) -> bool:
    """Whether the process ends within the deadline: its pidfd is readable then."""
    try:
        return bool(select.select([pidfd], [], [], 30)[0])
    finally:
        os.close(pidfd)


def test_a_child_ends_when_its_parent_is_killed() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines:
        with os.fdopen(writing, "w") as output:
            parent = forked.start("tests.run_code", PARENT, output=output)
        child = os.pidfd_open(int(lines.readline()))
        parent.kill()

        assert ends(child)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    """As if the parent had died between the fork and the call: the pid of the parent is another one."""
    done = subprocess.run([sys.executable, "-c", GRANDCHILD], capture_output=True, text=True, check=True)

    assert done.stdout == "before\n"


def test_a_killed_group_has_no_process_left() -> None:
    with subprocess.Popen([sys.executable, "-c", GROUP], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        grandchild = os.pidfd_open(int(process.stdout.readline()))
        kill_group(process)

        assert process.wait(30) == -signal.SIGKILL
        assert ends(grandchild)
    kill_group(process)  # nothing is left to kill
