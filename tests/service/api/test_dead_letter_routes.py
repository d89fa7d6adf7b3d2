"""Dead letters over the API: what is parked is shown, and what is asked of it is a command with a line in the audit."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from cdc.catalog import Catalog, DeadLetter
from cdc.catalog.dead_letter_requests import DLQ
from cdc.service.api.app import create_app
from tests.service.pipeline import NAME, definition, new_catalog
from tests.service.running import answering, client_of

LETTERS = f"/api/v1/pipelines/{NAME}/dlq"


def letter(sink: str, *key: str) -> DeadLetter:
    return DeadLetter(sink=sink, topic="shop.orders", key=key, position=100, ordinal=int(key[0]), code="CDC-3001",
                      message="column 'price' …", added_at=datetime(2026, 1, 2, tzinfo=UTC))  # fmt: skip


FIRST, SECOND, OTHER = letter("lake", "1"), letter("lake", "2", "b"), letter("find", "3")


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with new_catalog(tmp_path) as opened:
        opened.dead_letters.mirror(NAME, "lake", [FIRST, SECOND])
        opened.dead_letters.mirror(NAME, "find", [OTHER])
        yield opened


@pytest.fixture
def client(catalog: Catalog, tmp_path: Path) -> Iterator[httpx.Client]:
    shop = definition(tmp_path)
    with answering(create_app(catalog, shop, "log")) as url, client_of(url, timeout=60) as opened:
        yield opened


def test_letters_are_listed_and_found_by_the_beginning_of_their_name(client: httpx.Client) -> None:
    assert [found["id"] for found in client.get(LETTERS).json()] == [FIRST.id, SECOND.id, OTHER.id]
    assert client.get(f"{LETTERS}/{SECOND.id[:6]}").json() == {
        "id": SECOND.id, "sink": "lake", "table": "shop.orders", "key": ["2", "b"], "position": "0/64", "ordinal": 2,
        "code": "CDC-3001", "message": "column 'price' …", "first_at": "2026-01-02T00:00:00+00:00",
    }  # fmt: skip


def test_a_wish_is_a_command_for_each_sink_and_stands_in_the_audit(client: httpx.Client, catalog: Catalog) -> None:
    assert client.post(f"{LETTERS}/retry", json={}).status_code == 202
    assert client.post(f"{LETTERS}/{FIRST.id}/retry", json={}).json()["ids"] == [FIRST.id]
    assert client.post(f"{LETTERS}/{SECOND.id}/discard", json={"reason": "known"}).status_code == 202
    asked = [command.payload for command in catalog.commands.pending(NAME, DLQ)]
    assert asked == [
        {"sink": "lake", "verb": "retry", "ids": [FIRST.id, SECOND.id]},
        {"sink": "find", "verb": "retry", "ids": [OTHER.id]},
        {"sink": "lake", "verb": "retry", "ids": [FIRST.id]},
        {"sink": "lake", "verb": "discard", "ids": [SECOND.id]},
    ]
    newest = catalog.audit.ls(1)[0]
    assert (newest.actor, newest.action, newest.detail) == (
        "api from 127.0.0.1", "dlq discard",
        {"sink": "lake", "ids": [SECOND.id], "tables": ["shop.orders"], "reason": "known"},
    )  # fmt: skip


def test_what_cannot_be_meant_is_refused_and_asks_nothing(client: httpx.Client, catalog: Catalog) -> None:
    assert client.get(f"{LETTERS}/nope").status_code == 404
    assert client.post(f"{LETTERS}/nope/retry", json={}).status_code == 404
    assert client.post(f"{LETTERS}/{FIRST.id}/discard", json={}).status_code == 422
    assert client.post(f"{LETTERS}/{FIRST.id}/discard", json={"reason": ""}).status_code == 422
    assert client.post(f"{LETTERS}/retry", json={"ids": ["nope"]}).status_code == 404
    assert client.get(LETTERS.replace(NAME, "other")).status_code == 404
    assert catalog.commands.pending(NAME, DLQ) == []
