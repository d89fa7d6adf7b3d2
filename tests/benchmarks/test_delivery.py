"""Delivery: the client library alone sends with the settings of our destination."""

from __future__ import annotations

from cdc.config.destinations import KafkaDelivery
from cdc.delivery.destinations import kafka
from cdc.delivery.destinations.kafka_client import producer_settings
from tests.benchmarks.delivery import BATCH_SIZE, peer_settings


def test_the_producer_of_the_peer_has_our_settings_without_transactions() -> None:
    settings = KafkaDelivery.model_validate({"type": "kafka", "name": "events", "servers": ["localhost:9092"]})
    ours, peer = producer_settings(settings, "id", kafka._BATCH_SIZE), peer_settings(settings)

    assert {name for name in ours if peer.get(name) != ours[name]} == {"transactional.id", "transaction.timeout.ms"}
    assert (peer["enable.idempotence"], peer["acks"]) == (True, "all")
    assert kafka._BATCH_SIZE == BATCH_SIZE
