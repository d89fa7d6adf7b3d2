"""The contract of destinations: what distinguishes deliveries, and what a refusal says."""

from __future__ import annotations

import pytest

from cdc.config.destinations import StdoutDelivery
from cdc.delivery.destinations import CLASSES, new_destination
from cdc.delivery.destinations.contract import DeliveryIdentity, Destination, EventsRefused
from cdc.errors import EventTooLarge


def test_an_identity_is_pipeline_and_delivery() -> None:
    assert str(DeliveryIdentity("shop", "events", "a-log")) == "shop.events"


def test_a_refusal_counts_its_events() -> None:
    refused = EventsRefused({"a": EventTooLarge("too large")})
    assert (str(refused), refused.others_acknowledged) == ("1 events were refused", False)


def test_a_destination_has_every_call_of_the_contract() -> None:
    settings = StdoutDelivery(type="stdout", name="pipe")
    assert isinstance(new_destination(settings, DeliveryIdentity("shop", "pipe", "a-log")), Destination)


@pytest.mark.parametrize("kind", CLASSES)
def test_each_type_names_one_class(kind: str) -> None:
    module, separator, name = CLASSES[kind].partition(":")
    assert (separator, module.islower(), name.endswith("Destination")) == (":", True, True)
