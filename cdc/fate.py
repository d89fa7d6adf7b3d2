"""Fates: what a loop does about an error, and with what status a command ends in one."""

from __future__ import annotations

from enum import Enum, StrEnum


class Reaction(StrEnum):
    """What the loop that meets an error does."""

    #: Back off and try again; the cause may go by itself.
    RETRY = "retry"
    #: Stop, say why, and wait for a person.
    HALT = "halt"
    #: Set the row or the table aside and go on with the others.
    QUARANTINE = "quarantine"


class ExitCode(int, Enum):
    """Exit status of every command."""

    #: Done.
    OK = 0
    #: It failed while running.
    RUNTIME = 1
    #: The command line or the definition is wrong; nothing was started.
    USAGE = 2
    #: The surroundings do not allow it: unreachable, denied, missing.
    ENVIRONMENT = 3
    #: It ran, and what it found is bad: unhealthy, unequal.
    FINDING = 4
    #: Of reader, apply and server: it stopped for good; started again it ends alike until a person acts.
    HALTED = 5
