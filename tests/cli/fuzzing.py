"""`python -m tests.cli.fuzzing FOLDER SEED COUNT [DSN]`: random commands over a pipeline with random faults.

Each command runs in this process on a copy of one small pipeline, of which some files are broken, missing, of another
kind or closed. What breaks a promise of the command line is printed as one JSON object per line, with the number that
makes it again; DSN is of a database that may be changed at will.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from ctypes import CDLL, byref, c_uint32, get_errno
from io import StringIO
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Final

from typer.main import get_command

from cdc.__main__ import main
from cdc.catalog import Catalog
from cdc.cli.app import application
from cdc.config import load_definition
from cdc.targets.published_record import Published
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.cli.trimmed import Folder
from tests.contracts.folded import ORDERS, batch, put
from tests.service.pipeline import fill

SECONDS: Final = 30
"""That a command may take."""
STATUSES: Final = frozenset({0, 1, 2, 3, 4, 130})
ENDLESS: Final = frozenset({"demo", "run", "reader", "server", "spark submit", "verify", "replay", "log compact"})
"""Commands that stay, or start processes of their own."""
STAYING: Final = frozenset({"--follow", "--watch", "--every", "--rules", "--wait"})
CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c]")
UNEXPECTED: Final = re.compile(r'✗ CDC-0000|"code": "CDC-0000", "message"|unexpected \w+ (?:at|in) ')
ODD: Final = (
    *("", " ", "\x1b[2J\x1b[31m", "a\nb", "a\rb", "\u202egpj.exe", "\x9b31m", "\udcff", "9" * 40, "-1", "0", "1e309"),
    *("nan", "inf", "*", "**", "[", "[!", "(", "shop.*", "shop.orders", "orders", "../../etc/passwd", "/", "/dev/null"),
    *("'; drop table x; --", "{schema}", "${HOME}", "%s%n", "💥" * 50, "x" * 5000, "true", "null", "2026-13-45"),
    *(
        "16/B374D848",
        "0/AA",
        "2:0/A0",
        "FFFFFFFF/FFFFFFFF",
        "latest",
        "published",
        "beginning",
        "--help",
        "--json",
        "--",
    ),
    *("lake", "find", "1", "2", "7", "head", "select 1/0", "select * from orders", "copy orders to 'x.csv'", "c,u,d"),
    *("2026-11-23T02:00:00Z", "9999-12-31", "0001-01-01", "id=1", "id = 1", "checksum", "debezium", "flat", "jsonl"),
)
TEXT: Final = (
    "\t",
    ":",
    "- ",
    "{",
    "}",
    "[",
    "]",
    "'",
    '"',
    "#",
    "&a",
    "*a",
    "!!python/object:os.system",
    "|",
    ">",
    "%",
)
PR_CAPBSET_DROP = 24
"""A call of prctl, after which started programs do not get a capability again."""


def ground(folder: Path, dsn: str | None) -> None:
    """A pipeline with a log that is partly compacted and trimmed, a catalog, and a lake with one cut."""
    made = Folder.half(folder)
    text = made.path.read_text(encoding="utf-8")
    made.path.write_text(text.replace("postgresql://localhost/shop", dsn or "postgresql://nobody@127.0.0.1:1/no"))
    made.consumer("lake", 190)
    with Catalog.open(load_definition(made.path).catalog.url) as catalog:
        fill(catalog)
    sink = DeltaSink(DeltaSettings("lake", f"{folder}/lake/{{schema}}/{{table}}"))
    sink.open("log-1")
    sink.publish(
        Published(20, 20_000_000, {1: sink.apply(batch([put(1, "\x1b[2Jo", 20)], 0, 20, ORDERS, generation=1))})
    )


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its words."""
    below = getattr(command, "commands", None)
    if below is None:
        yield words, command
        return
    for name, one in below.items():
        yield from leaves(one, (*words, name))


def arguments(random: Random, folder: Path) -> list[str]:
    """A command with some of its options."""
    known = [leaf for leaf in leaves(get_command(application())) if " ".join(leaf[0]) not in ENDLESS]
    words, command = random.choice(known)
    given = list(words)
    for parameter in command.params:
        if STAYING & set(parameter.opts) or parameter.opts == ["--config", "-c"]:
            continue
        if not parameter.opts[0].startswith("-"):
            given += [value(random, folder) for _ in range(random.choice((0, 1, 1, 1, 2)))]
        elif random.random() < 0.4:
            given += [parameter.opts[0]] if parameter.is_flag else [parameter.opts[0], value(random, folder)]
    if any(parameter.opts == ["--config", "-c"] for parameter in command.params):
        given += ["-c", str(folder / "pipeline.yaml") if random.random() < 0.9 else value(random, folder)]
    if random.random() < 0.05:
        given.insert(random.randrange(len(given) + 1), value(random, folder))
    return given


def value(random: Random, folder: Path) -> str:
    """A word of a command line."""
    return str(random.choice(below(folder))) if random.random() < 0.15 else random.choice(ODD)


def below(folder: Path) -> list[Path]:
    """Every file and directory that can be reached."""
    found = [Path(parent) / name for parent, folders, files in os.walk(folder) for name in (*folders, *files)]
    return sorted(path for path in found if os.access(path.parent, os.X_OK)) or [folder]


def spoil_definition(random: Random, folder: Path) -> None:
    """Break the text at one place."""
    path = folder / "pipeline.yaml"
    is_readable = path.is_file() and os.access(path, os.W_OK | os.R_OK)
    text = path.read_text(encoding="utf-8", errors="replace") if is_readable else ""
    if not text.strip():
        return
    at, odd = random.randrange(len(text)), random.choice((*TEXT, *ODD))
    path.write_bytes(
        random.choice(
            (
                (text[:at] + text[at + 1 :]).encode(),
                (text[:at] + odd + text[at:]).encode(errors="surrogateescape"),
                text[:at].encode(),
                text.replace(random.choice(text.split()), random.choice((*TEXT, *ODD))).encode(
                    errors="surrogateescape"
                ),
                (text + random.choice(text.splitlines()) + "\n").encode(),
                text.encode("utf-16"),
                random.randbytes(200),
                b"[" * 5000,
                b"",
            )
        )
    )


def spoil_file(random: Random, folder: Path) -> None:
    """Break a file of the log, the lake or the catalog."""
    path = random.choice([path for path in below(folder) if path.is_file()])
    way = random.randrange(7)
    content = path.read_bytes() if os.access(path, os.R_OK) else b""
    if way == 0 or not os.access(path, os.W_OK):
        path.chmod(0)
    elif way in {1, 2}:
        path.unlink()
        if way == 2:
            path.mkdir()
    else:
        at = random.randrange(len(content) + 1)
        path.write_bytes((b"", content[:at], content[:at] + b"\xff" + content[at + 1 :], random.randbytes(99))[way - 3])


def spoil_directory(random: Random, folder: Path) -> None:
    """Take a directory away, close it, or put something else in its place."""
    path = random.choice([path for path in below(folder) if path.is_dir() and not path.is_symlink()] or [folder])
    way = random.randrange(6)
    if way < 3:
        path.chmod((0, 0o555, 0o444)[way])
        return
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        return  # a part of it is closed
    if way == 4:
        path.write_text("a file", encoding="utf-8")
    if way == 5:
        path.symlink_to(path)


FAULTS: Final[tuple[Callable[[Random, Path], None], ...]] = (spoil_definition, spoil_file, spoil_file, spoil_directory)


class Terminal(StringIO):
    """Output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Overdue(BaseException):
    """A command that does not end."""


@contextmanager
def ending() -> Iterator[None]:
    def late(_number: int, _frame: FrameType | None) -> None:
        raise Overdue

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def broken(given: list[str], status: int, output: str, errors: str) -> str | None:
    """The promise that the command did not keep."""
    everything = output + errors
    if "Traceback" in everything:
        return "a traceback"
    if UNEXPECTED.search(everything):
        return "an error that nobody expected"
    if status not in STATUSES:
        return f"exit status {status}"
    if "--json" not in given:
        found = CONTROL.search(everything)
        return found and f"a control character {found[0]!r}"
    if "--help" in given or "-h" in given or "--" in given:
        return None
    return not_one_envelope(output, status)


def not_one_envelope(output: str, status: int) -> str | None:
    try:
        said = json.loads(output)
    except ValueError:
        return "not one JSON object"
    if not isinstance(said, dict) or list(said) != ["command", "ok", "summary", "result", "error"]:
        return "no envelope"
    return None if status or said["ok"] or said["command"] == "status" else "ok is false with exit status 0"


def attempt(number: str, folder: Path, template: Path) -> dict[str, Any] | None:
    """Run one command; what it broke."""
    random = Random(number)
    opened(folder)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    for fault in random.choices(FAULTS, k=random.choice((0, 1, 1, 2))):
        fault(random, folder)
    given = arguments(random, folder)
    output, errors = Terminal(), Terminal()
    try:
        with ending(), redirect_stdout(output), redirect_stderr(errors):
            status = main(given)
    except BaseException as exc:
        status, said = -1, type(exc).__name__
    else:
        said = ""
    what = said or broken(given, status, output.getvalue(), errors.getvalue())
    if what is None:
        return None
    return {
        "number": number,
        "command": given,
        "broken": what,
        "status": status,
        "output": output.getvalue()[-2000:],
        "errors": errors.getvalue()[-3000:],
    }


def opened(folder: Path) -> None:
    """Let everything in it be removed again."""
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            if not (Path(parent) / name).is_symlink():
                (Path(parent) / name).chmod(0o700)


def obey_modes(folder: Path) -> None:
    """Have root obey the modes of files, as every other user does: without CAP_DAC_OVERRIDE and _READ_SEARCH."""
    kernel = CDLL(None, use_errno=True)
    for capability in (1, 2):
        assert kernel.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0, os.strerror(get_errno())
    header, sets = (c_uint32 * 2)(0x20080522, 0), (c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    assert kernel.capget(byref(header), byref(sets)) == 0, os.strerror(get_errno())
    for number in range(3):
        sets[number] &= ~0b110
    assert kernel.capset(byref(header), byref(sets)) == 0, os.strerror(get_errno())
    closed = folder / "closed"
    closed.touch(0)
    with suppress(PermissionError):
        closed.read_bytes()
        raise AssertionError("modes are not obeyed")
    closed.unlink()


def run(folder: Path, seed: str, count: int, dsn: str | None) -> None:
    """Run so many commands; what they broke goes to `found.jsonl`, for some of them write to standard output itself."""
    obey_modes(folder)
    place, template = folder / "work", folder / "template"
    place.mkdir()
    ground(place, dsn)
    place.rename(template)
    os.chdir(folder)
    os.environ.update({"NO_COLOR": "1", "TERM": "dumb"})
    with (folder / "found.jsonl").open("w", encoding="utf-8") as found:
        for number in range(count):
            if (broke := attempt(f"{seed}-{number}", place, template)) is not None:
                print(json.dumps(broke), file=found, flush=True)
        print(json.dumps({"ran": count}), file=found)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
