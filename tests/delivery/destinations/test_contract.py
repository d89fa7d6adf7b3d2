"""The contract of destinations: what distinguishes deliveries, and what a refusal says."""

from __future__ import annotations

from typing import get_args

import pytest

from cdc.config.destinations import Delivery, StdoutDelivery
from cdc.delivery.destinations import KINDS, new_destination
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


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_names_one_class(kind: str) -> None:
    module, separator, name = KINDS[kind].place.partition(":")
    assert (separator, module.islower(), name.endswith("Destination")) == (":", True, True)


def test_each_type_of_delivery_in_a_definition_has_one_destination() -> None:
    union, _ = get_args(Delivery)
    types = {get_args(model.model_fields["type"].annotation)[0] for model in get_args(union)}

    assert types == KINDS.keys()
