"""Requests to deliveries: a pause lasts until somebody resumes, and a rewind is carried out once."""

from __future__ import annotations

from cdc.catalog import Catalog, delivery_requests
from cdc.catalog.delivery_requests import PAUSE_DELIVERY, REWIND_DELIVERY


def test_a_delivery_is_paused_until_it_is_resumed(catalog: Catalog) -> None:
    assert delivery_requests.pause_of(catalog, "shop", "copy") is None
    assert delivery_requests.pause(catalog, "shop", "copy", "ada")
    assert not delivery_requests.pause(catalog, "shop", "copy", "ada")
    assert delivery_requests.pause_of(catalog, "shop", "copy") is not None
    assert delivery_requests.pause_of(catalog, "shop", "other") is None

    assert delivery_requests.resume(catalog, "shop", "copy", "ada")
    assert not delivery_requests.resume(catalog, "shop", "copy", "ada")
    assert delivery_requests.pause_of(catalog, "shop", "copy") is None


def test_a_rewind_is_awaited_until_the_process_has_carried_it_out(catalog: Catalog) -> None:
    number = delivery_requests.request_rewind(catalog, "shop", "copy", "0/1", "ada")
    assert not delivery_requests.await_rewind(catalog, number, patience=0.0)

    catalog.commands.finish(number, {})

    assert delivery_requests.await_rewind(catalog, number)


def test_every_request_is_in_the_audit_log(catalog: Catalog) -> None:
    delivery_requests.pause(catalog, "shop", "copy", "ada")
    delivery_requests.resume(catalog, "shop", "copy", "ada")
    delivery_requests.request_rewind(catalog, "shop", "copy", "0/1", "ada")

    assert [one.action for one in catalog.audit.ls(10)] == ["delivery rewind", "delivery resume", "delivery pause"]


def test_requests_of_several_kinds_are_read_at_once_in_order(catalog: Catalog) -> None:
    number = delivery_requests.request_rewind(catalog, "shop", "copy", "0/1", "ada")
    delivery_requests.pause(catalog, "shop", "copy", "ada")

    found = catalog.commands.pending("shop", PAUSE_DELIVERY, REWIND_DELIVERY)

    assert [one.kind for one in found] == [REWIND_DELIVERY, PAUSE_DELIVERY]
    assert found[0].id == number
