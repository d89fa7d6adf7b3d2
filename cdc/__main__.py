"""Entry point of the `cdc` command: runs one command and turns a failure into a message and an exit status."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import typer
from typer.main import get_command

from cdc.cli.app import application
from cdc.cli.options import Invocation
from cdc.command_output import discard_output, error_to_report, fail
from cdc.errors import CdcError, ConfigError, ExitCode, complete_remedy, process_exit_code
from cdc.file_modes import product_umask
from cdc.garbage import collect_garbage_rarely
from cdc.process_exit import exit_process

INTERRUPTED: Final = 130
"""Exit status after an interrupt: 128 + SIGINT, as shells use it."""
_LONG_RUNNING: Final = frozenset({"deliver", "reader", "server"})
"""Commands that run until they are stopped, and write log messages to standard error, including tracebacks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, one of `ExitCode` or 130 after an interrupt.

    Reader, deliveries and server exit with 5 instead of 1 if a restart would fail again. Without `arguments` the
    command line of the process is run, and these commands do not return: they end the process.
    """
    owns_process = arguments is None
    given = list(sys.argv[1:] if arguments is None else arguments)
    if owns_process:
        collect_garbage_rarely()
        # else the interpreter searches all objects for garbage while it exits, for up to 0.7 s
        atexit.register(gc.freeze)
        _escape_unprintable()
        # no command uses a pydantic plugin, and the search for plugins reads the metadata of every installed package
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    command = get_command(application(given[0] if given else None))
    status = _run(command, given, owns_process=owns_process)
    if owns_process and _command_name(command, given) in _LONG_RUNNING:
        exit_process(status)
    return status


def _run(command: Any, given: list[str], *, owns_process: bool) -> int:
    """Run the command with the given arguments, and return its exit status."""
    try:
        with product_umask():
            status = command.main(args=given, prog_name="cdc", standalone_mode=False, obj=Invocation(owns_process))
        sys.stdout.flush()
        return status if isinstance(status, int) else ExitCode.OK.value
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of the output closed it, as head does
        discard_output()
        return ExitCode.RUNTIME.value
    except typer.TyperException as error:
        return _report_usage_error(command, given, error)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - an engine's panic is no Exception
        return _report_error(
            command, given, error_to_report(error, logs=_command_name(command, given) in _LONG_RUNNING)
        )


def _escape_unprintable() -> None:
    """Make the output streams print an escape for each character that the terminal's encoding cannot represent."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _report_error(command: Any, given: list[str], error: CdcError) -> int:
    error.fix = complete_remedy(error.fix, file=_definition_path(given))
    words = _command_name(command, given)
    fail(words, error, json="--json" in given)
    return int((process_exit_code(error) if words in _LONG_RUNNING else error.exit_code).value)


def _definition_path(given: list[str]) -> str | None:
    """Return the path of the definition from the command-line arguments; None if no option names a file."""
    own = given[: given.index("--")] if "--" in given else given
    for index, word in enumerate(own[:-1]):
        if word in {"-c", "--config"}:
            return own[index + 1]
    return next((word.partition("=")[2] for word in own if word.startswith("--config=")), None)


def _report_usage_error(command: Any, given: list[str], error: Any) -> int:
    words = _command_name(command, given)
    if not given or type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return ExitCode.USAGE.value
    message = (
        error.format_message().rstrip(".").replace(": Value error, ", ": ")
    )  # a prefix that the parser of enums adds
    remedy = f"run '{' '.join(['cdc', *words.split(), '--help'])}'"
    return _report_error(command, given, ConfigError(message[:1].lower() + message[1:], remedy=remedy))


def _command_name(command: Any, given: list[str]) -> str:
    """Return the command and its subcommand, such as `migrate up`, from the beginning of the arguments."""
    words = []
    for argument in given:
        command = getattr(command, "commands", {}).get(argument)
        if command is None:
            break
        words.append(argument)
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
