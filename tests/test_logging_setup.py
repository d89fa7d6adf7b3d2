"""Process logs: what a person is to run next stands there as it can be copied."""

from __future__ import annotations

import json

import httpx
import pytest
import structlog

from cdc.logging_setup import LogFormat, configure
from tests.fixtures.http_relay import Answer, HttpRelay

pytestmark = pytest.mark.usefixtures("restored_logging")


def test_remedies_have_definition_sink_and_table_in_place_of_words_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogFormat.JSON, file="shop.yaml")
    log = structlog.get_logger("test")
    log.warning("stopped", sink="lake", table="shop.orders", fix="run 'cdc replay SINK --tables TABLE -c FILE'")
    log.warning("stopped", sink="lake", table="shop.orders", reason="CDC-3005 x → 'cdc replay SINK --tables TABLE'")
    log.warning("stopped", fix="run 'cdc slots recover -c FILE --new-epoch'")
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["fix"] == "run 'cdc replay lake --tables shop.orders -c shop.yaml'"
    assert second["reason"] == "CDC-3005 x → 'cdc replay lake --tables shop.orders -c shop.yaml'"
    assert third["fix"] == "run 'cdc slots recover -c shop.yaml --new-epoch'"


def test_requests_to_a_search_server_are_no_messages_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    with HttpRelay("http://127.0.0.1:9") as relay:
        relay.fault("GET", Answer(200))
        assert httpx.get(relay.url).status_code == 200
    assert capsys.readouterr().err == ""
