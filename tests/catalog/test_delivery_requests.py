"""Requests to deliveries: a rewind is carried out once, and every request is in the audit log."""

from __future__ import annotations

from cdc.catalog import Catalog, delivery_requests
from cdc.catalog.delivery_requests import DELIVERY_PAUSES, REWIND_DELIVERY


def test_a_rewind_is_awaited_until_the_process_has_carried_it_out(catalog: Catalog) -> None:
    number = delivery_requests.request_rewind(catalog, "shop", "copy", "0/1", "ada")
    assert not delivery_requests.await_rewind(catalog, number, patience=0.0)

    catalog.commands.finish(number, {})

    assert delivery_requests.await_rewind(catalog, number)


def test_every_request_is_in_the_audit_log(catalog: Catalog) -> None:
    DELIVERY_PAUSES.pause(catalog, "shop", "copy", "ada")
    DELIVERY_PAUSES.resume(catalog, "shop", "copy", "ada")
    delivery_requests.request_rewind(catalog, "shop", "copy", "0/1", "ada")

    assert [one.action for one in catalog.audit.ls(10)] == ["delivery rewind", "delivery resume", "delivery pause"]


def test_requests_of_several_kinds_are_read_at_once_in_order(catalog: Catalog) -> None:
    number = delivery_requests.request_rewind(catalog, "shop", "copy", "0/1", "ada")
    DELIVERY_PAUSES.pause(catalog, "shop", "copy", "ada")

    found = catalog.commands.pending("shop", DELIVERY_PAUSES.kind, REWIND_DELIVERY)

    assert [one.kind for one in found] == [REWIND_DELIVERY, DELIVERY_PAUSES.kind]
    assert found[0].id == number
