"""Requests for dead letters: found by the beginning of an id, posted per sink, answered by the apply process."""

from __future__ import annotations

import pytest

from cdc.catalog import Catalog
from cdc.catalog.dead_letter_requests import (
    DLQ,
    DeadLetterAction,
    DeadLetterRequest,
    await_outcomes,
    find_dead_letters,
    request_action,
)
from cdc.errors import UnknownName
from tests.catalog.test_dead_letter_mirror import letter

RETRY = DeadLetterRequest(DeadLetterAction.RETRY, "ann")


@pytest.fixture(autouse=True)
def _letters(catalog: Catalog) -> None:
    catalog.dead_letters.mirror("shop", "lake", [letter("lake", 10, "1"), letter("lake", 11, "2")])
    catalog.dead_letters.mirror("shop", "find", [letter("find", 12, "1")])


def test_a_dead_letter_is_found_by_the_beginning_of_its_id(catalog: Catalog) -> None:
    wanted = letter("lake", 11, "2")
    assert find_dead_letters(catalog, "shop", [wanted.id[:8]]) == [wanted]
    for unknown in ("zz", ""):
        with pytest.raises(UnknownName, match="there is no dead letter with the id"):
            find_dead_letters(catalog, "shop", [unknown])


def test_each_sink_gets_a_command_and_the_audit_an_entry(catalog: Catalog) -> None:
    numbers = request_action(catalog, "shop", catalog.dead_letters.ls("shop"), RETRY)
    posted = catalog.commands.pending("shop", DLQ)
    assert [command.id for command in posted] == numbers
    assert [(command.payload["sink"], len(command.payload["ids"])) for command in posted] == [("lake", 2), ("find", 1)]
    assert {line.action for line in catalog.audit.ls()} == {"dlq retry"}


def test_outcomes_are_those_that_are_known_in_time(catalog: Catalog) -> None:
    first, second = request_action(catalog, "shop", catalog.dead_letters.ls("shop"), RETRY)
    catalog.commands.finish(first, {"letters": {"a": "applied"}})
    assert await_outcomes(catalog, [first, second], patience=0.0) == {"a": "applied"}
