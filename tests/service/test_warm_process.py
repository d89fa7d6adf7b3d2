"""Children that are forked from a warm process are like programs that were started, but for the time it takes."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from tempfile import TemporaryFile

import pytest

from cdc.service.warm_process import LOST_STATUS, ONE_THREAD, ForkedProcess, WarmProcess
from tests.fixtures import forked

UP = "print('up', flush=True); signal.pause()"
PATIENT = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('drained'), sys.exit(0))); " + UP
WAIT = "import signal; " + UP
ABORT = "os:abort"
"""An entry of imports that ends the warm process."""
STOP_AFTER_FORK = "tests.fixtures.forked:stop_after_fork"
"""An entry of imports that stops the warm process between a fork and what it does next."""
RUNNING_TEST = "PYTEST_CURRENT_TEST"
"""A variable that pytest changes between a fixture and its test."""
SELF = """
import json, os, random, signal, sys
print(json.dumps({
    "arguments": sys.argv,
    "cmdline": open("/proc/self/cmdline").read().rstrip("\\0"),
    "session": os.getsid(0) == os.getpid(),
    "input": sys.stdin.read() + os.readlink("/proc/self/fd/0"),
    "default": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "variables": {**os.environ},
    "files": len(os.listdir("/proc/self/fd")),
    "random": random.random(),
}))
"""


@pytest.fixture(name="warm")
def _warm() -> Iterator[WarmProcess]:
    with WarmProcess() as warm:
        yield warm


def command(code: str, *arguments: str) -> Sequence[str]:
    return (sys.executable, "-u", "-m", "tests.run_code", code, *arguments)


def fork(warm: WarmProcess, code: str, *imports: str) -> ForkedProcess:
    return warm.fork(command(code), imports)


def first_line(process: ForkedProcess) -> str:
    return process.stdout.readline().decode().strip()


def output(process: ForkedProcess) -> str:
    """All that it prints until it ends."""
    process.wait()
    return process.stdout.read().decode()


def test_a_child_has_what_a_program_has(warm: WarmProcess) -> None:
    given = command(SELF, "-c", "shop.yaml")
    found = json.loads(output(warm.fork(given, ())))

    assert found["arguments"][1:] == ["-c", "shop.yaml"]
    assert found["cmdline"] == " ".join(given)
    assert found["session"]
    assert found["input"] == os.devnull
    assert found["default"]
    assert found["blocked"] == []
    assert found["variables"] == {**os.environ, RUNNING_TEST: found["variables"][RUNNING_TEST]}


def test_children_share_no_random_numbers_and_no_files(warm: WarmProcess) -> None:
    running = fork(warm, WAIT)
    assert first_line(running) == "up"
    one, other = (json.loads(output(fork(warm, SELF))) for _ in range(2))

    assert one["random"] != other["random"]
    assert one["files"] == other["files"] == 4  # input, output, errors and the folder that is listed


def test_a_child_reads_the_input_that_it_is_given(warm: WarmProcess) -> None:
    with TemporaryFile() as file:
        file.write(b"given")
        file.seek(0)
        process = warm.fork(command("import sys; print(sys.stdin.read())"), (), file.fileno())

    assert output(process) == "given\n"


def test_a_child_ends_as_a_program_does(warm: WarmProcess) -> None:
    handler = "import atexit, sys; atexit.register(print, 'bye'); print('error', file=sys.stderr); sys.exit(5)"
    # the warm process may write into a file, which has positions, and the child writes into a pipe
    handler = f"import sys; [one.reconfigure(errors='replace') for one in (sys.stdout, sys.stderr)]; {handler}"
    process = fork(warm, handler)
    assert output(process) == "error\nbye\n"
    assert (process.returncode, process.is_lost) == (5, False)

    failed = fork(warm, "raise ValueError('wrong')")
    assert output(failed).startswith("Traceback (most recent call last):\n")
    assert failed.returncode == 1

    killed = fork(warm, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.wait() == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_warm_process_reaches_no_child(warm: WarmProcess, number: signal.Signals) -> None:
    process = fork(warm, WAIT)
    assert first_line(process) == "up"
    os.kill(warm.pid, number)

    assert first_line(fork(warm, "print('later')")) == "later"
    assert process.poll() is None


def test_a_signal_reaches_a_child_that_is_not_forked_yet(warm: WarmProcess) -> None:
    terminated, killed = fork(warm, WAIT), fork(warm, WAIT)
    terminated.terminate()
    killed.kill_group()

    assert (terminated.pid, killed.pid) == (0, 0)
    assert (terminated.wait(), killed.wait()) == (-signal.SIGTERM, -signal.SIGKILL)


def test_a_running_child_can_be_stopped_and_killed(warm: WarmProcess) -> None:
    process, other = fork(warm, PATIENT), fork(warm, PATIENT)
    assert (first_line(process), first_line(other)) == ("up", "up")
    assert (process.poll(), other.poll()) == (None, None)
    process.terminate()
    other.kill_group()

    assert (process.wait(), other.wait()) == (0, -signal.SIGKILL)
    process.terminate()  # has ended, so nothing happens
    process.kill_group()


def test_the_modules_of_a_child_are_imported_before_it_is_forked(warm: WarmProcess) -> None:
    code = "import sys; print('uuid' in sys.modules, 'calendar' in sys.modules)"

    assert first_line(fork(warm, code, "uuid", "no_such_module", "calendar:no_such_function")) == "True True"


def test_children_end_with_the_warm_process_and_the_next_one_has_a_new_one(warm: WarmProcess) -> None:
    process, earlier = fork(warm, PATIENT), warm.pid
    assert first_line(process) == "up"
    os.kill(earlier, signal.SIGKILL)

    assert first_line(process) == "drained"
    assert (process.wait(), process.is_lost) == (LOST_STATUS, True)
    assert output(fork(warm, "print('again')")) == "again\n"
    assert warm.pid != earlier


def test_a_child_that_could_not_be_forked_is_lost(warm: WarmProcess) -> None:
    process = fork(warm, "print('never')", ABORT)

    assert (process.wait(), process.is_lost, process.pid) == (LOST_STATUS, True, 0)
    assert process.stdout.read() == b""


def test_a_running_child_is_known_even_if_the_warm_process_dies_right_after_the_fork(warm: WarmProcess) -> None:
    process = fork(warm, PATIENT, STOP_AFTER_FORK)
    assert first_line(process) == "up"
    os.kill(warm.pid, signal.SIGKILL)

    assert first_line(process) == "drained"
    assert (process.wait(), process.is_lost) == (LOST_STATUS, True)
    assert process.pid


def test_libraries_of_children_have_the_variables_of_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    monkeypatch.delenv("JE_ARROW_MALLOC_CONF", raising=False)
    code = f"import os; print({{name: os.environ.get(name) for name in {list(ONE_THREAD)}}})"
    with WarmProcess() as warm:
        found = first_line(fork(warm, code))

    assert found == str({name: os.environ.get(name) for name in ONE_THREAD})


def test_a_child_ends_when_the_supervisor_is_killed() -> None:
    supervisor = (
        "import sys\nfrom cdc.service.warm_process import WarmProcess\n"
        f"warm = WarmProcess()\nchild = warm.fork((sys.executable, '-u', '-m', 'tests.run_code', {WAIT!r}), ())\n"
        "child.stdout.readline(); child.poll(); print(child.pid, flush=True); child.wait()"
    )
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines:
        with os.fdopen(writing, "w") as printed:
            process = forked.start("tests.run_code", supervisor, output=printed)
        child = os.pidfd_open(int(lines.readline()))
        process.kill()
        ended, _, _ = select.select([child], [], [], 30)
        os.close(child)

    assert ended
