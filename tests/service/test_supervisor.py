"""Children under supervision: they come back when they fall, and none is left when it ends."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest

from cdc.catalog import Catalog
from cdc.errors import ChildFailed, ExitCode
from cdc.service.pipeline_children import Child
from cdc.service.restart_policy import RestartPolicy, RestartTriggers
from cdc.service.supervisor import INTERRUPTED, Supervisor
from cdc.service.warm_process import WarmProcess
from tests.fixtures import forked

QUICK = RestartPolicy(first=0.01, most=0.05, jitter=0.01, deadline=10.0)
PATIENT = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('drained', flush=True), sys.exit(0))); "
WAIT = "print('up', flush=True)\nwhile True: signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAIT


def script(text: str, name: str = "child") -> Child:
    return Child(name, (sys.executable, "-c", text))


class Lines:
    """What children said, in the order it came."""

    def __init__(self) -> None:
        self.every: list[tuple[str, str]] = []
        self._news: Queue[tuple[str, str]] = Queue()

    def __call__(self, name: str, line: str) -> None:
        self.every.append((name, line))
        self._news.put((name, line))

    def wait(self, wanted: Callable[[str], bool], count: int = 1) -> None:
        while count:
            if wanted(self._news.get(timeout=30)[1]):
                count -= 1


@contextmanager
def running(supervisor: Supervisor) -> Iterator[list[int]]:
    """What run returned, once the block is left."""
    ended: list[int] = []
    thread = Thread(target=lambda: ended.append(supervisor.run()))
    thread.start()
    try:
        yield ended
    finally:
        supervisor.stop()
        thread.join(30)
        assert not thread.is_alive()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_falling_child_is_started_again_and_again() -> None:
    lines = Lines()
    supervisor = Supervisor([script("print('up', flush=True); raise SystemExit(1)")], policy=QUICK, say=lines)
    with running(supervisor):
        lines.wait(lambda line: line == "up", 3)
    assert supervisor.restarts["child"] >= 2
    assert any(line.startswith("ended with status 1; restarting in") for _, line in lines.every)


def test_a_child_killed_by_a_signal_is_started_again() -> None:
    lines = Lines()
    killed = "import os, signal; print('up', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    with running(Supervisor([script(killed)], policy=QUICK, say=lines)):
        lines.wait(lambda line: line == "up", 2)
    assert any(line.startswith("ended with signal 9") for _, line in lines.every)


def test_a_child_that_may_end_is_done_with_status_0_and_the_others_go_on() -> None:
    lines = Lines()
    ends = Child("ends", (sys.executable, "-c", "print('copied', flush=True)"), may_end=True)
    steady = script(PATIENT + WAIT, "steady")
    with running(supervisor := Supervisor([ends, steady], policy=QUICK, say=lines)) as ended:
        lines.wait(lambda line: line in {"up", "is done"}, 2)
        assert ended == []
    assert supervisor.restarts == {"ends": 0, "steady": 0}


def test_a_supervisor_of_children_that_may_end_ends_with_the_last_of_them() -> None:
    lines = Lines()
    children = [Child(name, (sys.executable, "-c", "pass"), may_end=True) for name in ("one", "two")]
    assert Supervisor(children, policy=QUICK, say=lines).run() == ExitCode.OK.value
    assert sorted(lines.every) == [("one", "is done"), ("two", "is done")]


def test_a_child_that_may_end_is_started_again_when_it_fails() -> None:
    lines = Lines()
    falls = Child("falls", (sys.executable, "-c", "print('up', flush=True); raise SystemExit(1)"), may_end=True)
    with running(Supervisor([falls], policy=QUICK, say=lines)):
        lines.wait(lambda line: line == "up", 2)


def test_other_children_go_on_while_one_falls() -> None:
    lines = Lines()
    fallen = script("raise SystemExit(1)", "fallen")
    steady = script(PATIENT + WAIT, "steady")
    with running(supervisor := Supervisor([fallen, steady], policy=QUICK, say=lines)):
        lines.wait(lambda line: line == "up")
        lines.wait(lambda line: "restarting" in line, 2)
    assert supervisor.restarts["steady"] == 0


HALTED = script("import sys; print('up', flush=True); sys.exit(5)", "halted")


def test_a_child_that_stopped_for_good_is_not_started_again_while_nobody_acts() -> None:
    lines = Lines()
    fallen = script("raise SystemExit(1)", "fallen")
    with running(supervisor := Supervisor([HALTED, fallen], policy=QUICK, say=lines)):
        lines.wait(lambda line: line.startswith("ended with status 5; restarting in 300.0 s, or at once"))
        lines.wait(lambda line: line.startswith("ended with status 1"), 3)
    assert supervisor.restarts["halted"] == 0


def test_a_child_that_stopped_for_good_is_started_on_request_and_after_its_long_wait() -> None:
    lines = Lines()
    with running(supervisor := Supervisor([HALTED], policy=QUICK, say=lines)):
        lines.wait(lambda line: line.startswith("ended with status 5"))
        supervisor.retry()
        lines.wait(lambda line: line == "up")
    with running(Supervisor([HALTED], policy=RestartPolicy(halted=0.05), say=lines)):
        lines.wait(lambda line: line == "up", 3)


def test_a_changed_definition_and_a_command_start_a_child_that_stopped_for_good(tmp_path: Path) -> None:
    file, url, lines = tmp_path / "shop.yaml", f"sqlite:///{tmp_path}/catalog.db", Lines()
    file.write_text("name: shop")
    triggers = RestartTriggers(file, url)
    with Catalog.open(url) as catalog, running(Supervisor([HALTED], policy=QUICK, say=lines, triggers=triggers)):
        lines.wait(lambda line: line.startswith("ended with status 5"))
        file.write_text("name: shop  # repaired")
        lines.wait(lambda line: line.startswith("ended with status 5"))
        catalog.audit.write("operator", "slots.recover", "shop")
        lines.wait(lambda line: line == "up")


def test_a_wrong_definition_ends_everything_and_leaves_no_child() -> None:
    lines = Lines()
    told = PATIENT + "import os; print(os.getpid(), flush=True)\n" + WAIT
    wrong = script("import sys; sys.exit(2)", "wrong")
    with pytest.raises(ChildFailed, match="'wrong'"):
        Supervisor([script(told), wrong], policy=QUICK, say=lines).run()
    pids = [int(line) for _, line in lines.every if line.isdigit()]
    assert not any(is_alive(pid) for pid in pids)


def test_stop_lets_children_finish_in_the_order_given() -> None:
    lines = Lines()
    children = [script(PATIENT + WAIT, name) for name in ("apply", "reader", "server")]
    with running(Supervisor(children, policy=QUICK, say=lines)) as ended:
        lines.wait(lambda line: line == "up", 3)
    assert ended == [ExitCode.OK.value]
    assert [name for name, line in lines.every if line == "drained"] == ["apply", "reader", "server"]


def test_a_child_that_does_not_end_is_killed_after_its_deadline() -> None:
    lines = Lines()
    policy = RestartPolicy(deadline=0.2)
    with running(Supervisor([script(STUBBORN)], policy=policy, say=lines)) as ended:
        lines.wait(lambda line: line == "up")
    assert ended == [0]
    assert ("child", "killed the process, because it did not end in time") in lines.every


def test_a_second_signal_kills_at_once() -> None:
    lines = Lines()
    supervisor = Supervisor([script(STUBBORN)], policy=RestartPolicy(deadline=3600), say=lines)
    with running(supervisor) as ended:
        lines.wait(lambda line: line == "up")
        supervisor.stop()
        supervisor.stop()
    assert ended == [INTERRUPTED]


SUPERVISED = """
import sys
from cdc.service.pipeline_children import Child
from cdc.service.supervisor import Supervisor
supervisor = Supervisor([Child("child", (sys.executable, "-c", {child!r}))])
supervisor.handle_signals()
sys.exit(supervisor.run())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_a_supervisor_that_is_ended(number: signal.Signals) -> None:
    child = PATIENT + "import os; print('pid', os.getpid(), flush=True)\n" + WAIT
    reading, writing = os.pipe()
    with os.fdopen(reading, encoding="utf-8") as lines:
        with os.fdopen(writing, "w", encoding="utf-8") as output:
            supervisor = forked.start("tests.run_code", SUPERVISED.format(child=child), output=output)
        pid = next(int(line.split()[-1]) for line in lines if "pid" in line)
        pidfd = os.pidfd_open(pid)
        supervisor.send_signal(number)
        status = supervisor.wait(30)
        # readable once the process has ended: a wait with a deadline and without polling
        ended, _, _ = select.select([pidfd], [], [], 30)
        os.close(pidfd)
    assert ended
    assert status == (0 if number is not signal.SIGKILL else -signal.SIGKILL)


def forked_script(text: str, name: str = "child", imports: tuple[str, ...] = ("uuid",)) -> Child:
    """A child that the warm process forks; it prints the pid of its parent first."""
    code = f"import os; print('parent', os.getppid(), flush=True); {text}"
    return Child(name, (sys.executable, "-u", "-m", "tests.run_code", code), imports=imports)


def test_a_killed_child_is_forked_again_from_the_same_warm_process() -> None:
    lines = Lines()
    killed = forked_script("import signal; os.kill(os.getpid(), signal.SIGKILL)")
    with WarmProcess() as warm, running(Supervisor([killed], policy=QUICK, say=lines, warm=warm)):
        lines.wait(lambda line: line == f"parent {warm.pid}", 3)
    assert any(line.startswith("ended with signal 9; restarting in") for _, line in lines.every)


def test_after_the_death_of_the_warm_process_all_children_are_forked_from_a_new_one() -> None:
    lines = Lines()
    children = [forked_script(PATIENT + WAIT, name) for name in ("apply", "reader")]
    with WarmProcess() as warm, running(supervisor := Supervisor(children, policy=QUICK, say=lines, warm=warm)):
        lines.wait(lambda line: line == "up", 2)
        os.kill(warm.pid, signal.SIGKILL)
        lines.wait(lambda line: line == "up", 2)
        later = warm.pid
    assert supervisor.restarts == {"apply": 1, "reader": 1}
    assert len([line for _, line in lines.every if line == f"parent {later}"]) == 2
    assert len([line for _, line in lines.every if line.startswith("ended with the warm process; restarting in")]) == 2


def test_a_child_that_cannot_be_forked_is_started_as_a_program() -> None:
    lines = Lines()
    child = forked_script(PATIENT + WAIT, imports=("os:abort",))
    with WarmProcess() as warm, running(Supervisor([child], policy=QUICK, say=lines, warm=warm)):
        lines.wait(lambda line: line == f"parent {os.getpid()}")
        lines.wait(lambda line: line == "up")
    assert any(line.startswith("was not started by the warm process; restarting in") for _, line in lines.every)


def test_forked_children_finish_in_the_order_given_and_programs_among_them() -> None:
    lines = Lines()
    children = [
        forked_script(PATIENT + WAIT, "apply"),
        script(PATIENT + WAIT, "reader"),
        forked_script(STUBBORN, "server"),
    ]
    policy = RestartPolicy(deadline=1)
    with WarmProcess() as warm, running(Supervisor(children, policy=policy, say=lines, warm=warm)) as ended:
        lines.wait(lambda line: line == "up", 3)
    assert ended == [ExitCode.OK.value]
    assert [name for name, line in lines.every if line == "drained"] == ["apply", "reader"]
    assert lines.every[-1] == ("server", "killed the process, because it did not end in time")
