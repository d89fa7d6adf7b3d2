"""The Kafka destination where it differs from others: topics, refusals of the broker, timeouts, access."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from socket import create_server
from time import monotonic
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from cdc.delivery.destinations.contract import Event, EventsRefused
from cdc.delivery.destinations.kafka import KafkaDestination
from cdc.errors import (
    CdcError,
    DeliveryError,
    DestinationDenied,
    DestinationNotTrusted,
    DestinationUnavailable,
    EventRefused,
    EventTooLarge,
    TopicMissing,
)
from tests.delivery.destinations.receivers.kafka import admin_client, committed, delivery, identity, messages
from tests.delivery.destinations.sending import event, numbered
from tests.delivery.loop_run import LoopRun, drain
from tests.delivery.sent_log import begin_log, change
from tests.fixtures.kafka import USER, KafkaServer, SharedKafka
from tests.fixtures.kafka_relay import RefusingKafkaRelay
from tests.fixtures.waiting import until
from tests.log.sample_log import ORDERS, commit_rows

MURMUR2 = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
"""Hashes of keys as Java's `org.apache.kafka.common.utils.Utils.murmur2` computes them."""


def destination_at(kafka: SharedKafka, **settings: Any) -> KafkaDestination:
    return KafkaDestination(delivery(kafka.address.plain, **settings), identity(kafka.prefix))


def opened(kafka: SharedKafka, **settings: Any) -> KafkaDestination:
    made = destination_at(kafka, **settings)
    made.open()
    return made


def deliver(destination: KafkaDestination, *events: Any) -> None:
    destination.send(events)
    destination.commit(b"done")


def failure(destination: KafkaDestination) -> CdcError:
    """The error with which it does not open; it is closed."""
    with closing(destination), pytest.raises(CdcError) as failed:
        destination.open()
    return failed.value


@pytest.fixture(name="admin")
def _admin(kafka: SharedKafka) -> AdminClient:
    return admin_client(kafka.address.plain)


def create(admin: AdminClient, topic: str, **config: str) -> None:
    settings = {name.replace("_", "."): value for name, value in config.items()}
    admin.create_topics([NewTopic(topic, 1, config=settings)], operation_timeout=30)[topic].result(30)


def config_of(admin: AdminClient, topic: str, name: str) -> str:
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    return str(admin.describe_configs([resource])[resource].result(30)[name].value)


def test_a_missing_topic_is_created_as_the_delivery_says(kafka: SharedKafka, admin: AdminClient) -> None:
    topic = f"{kafka.prefix}orders"
    topics = {"partitions": 5, "replication": 1, "config": {"cleanup.policy": "compact", "retention.ms": "1000"}}
    with closing(opened(kafka, topics=topics)) as destination:
        deliver(destination, event(1, topic, b"key", b"value"))

    assert len(admin.list_topics(topic, timeout=30).topics[topic].partitions) == 5
    assert config_of(admin, topic, "cleanup.policy") == "compact"
    assert config_of(admin, topic, "retention.ms") == "1000"
    assert config_of(admin, f"cdc.progress.{identity(kafka.prefix)}", "cleanup.policy") == "compact"


def test_a_delivery_waits_for_a_topic_that_it_may_not_create(kafka: SharedKafka, admin: AdminClient) -> None:
    topic, sent = f"{kafka.prefix}orders", event(1, f"{kafka.prefix}orders", b"key", b"value")
    destination = destination_at(kafka, topics={"create": False}, progress_topic=f"{kafka.prefix}progress")
    assert isinstance(failure(destination), TopicMissing)
    create(admin, f"{kafka.prefix}progress", cleanup_policy="compact")
    until(lambda: destination.open() is None, "a destination with its topic")
    with pytest.raises(TopicMissing, match=topic):
        destination.send([sent])
    destination.close()
    create(admin, topic)
    destination.open()
    deliver(destination, sent)
    destination.close()

    assert [one.id for one in committed(kafka.address.plain, topic)] == [sent.id]


def test_a_progress_topic_that_loses_old_records_is_not_used(kafka: SharedKafka, admin: AdminClient) -> None:
    create(admin, f"{kafka.prefix}progress", cleanup_policy="delete")
    error = failure(destination_at(kafka, progress_topic=f"{kafka.prefix}progress"))

    assert type(error) is DeliveryError
    assert "cleanup.policy" in error.message


def test_a_deleted_topic_is_created_again(kafka: SharedKafka, admin: AdminClient) -> None:
    topic = f"{kafka.prefix}orders"
    destination = opened(kafka, timeout="3s")
    deliver(destination, event(1, topic, b"key", b"value"))
    admin.delete_topics([topic], operation_timeout=30)[topic].result(30)
    with pytest.raises(CdcError) as failed:
        deliver(destination, event(2, topic, b"key", b"value"))
    destination.close()
    destination.open()
    deliver(destination, event(2, topic, b"key", b"value"))
    destination.close()

    assert failed.value.reaction == "retry"
    assert [one.value for one in committed(kafka.address.plain, topic)] == [b"value"]


@pytest.mark.parametrize("name", ["", "with space", "größe", "a/b", "x" * 250, "..", "line\n"])
def test_an_event_for_a_name_that_no_topic_can_have_is_refused(kafka: SharedKafka, name: str) -> None:
    sent = [event(1, name, b"key", b"value"), event(2, f"{kafka.prefix}orders", b"key", b"value")]
    with closing(opened(kafka)) as destination, pytest.raises(EventsRefused) as refused:
        destination.send(sent)

    assert {one: type(error) for one, error in refused.value.refused.items()} == {sent[0].id: EventRefused}


def test_every_event_that_a_broker_refuses_is_found(kafka: SharedKafka, admin: AdminClient) -> None:
    compacted, other = f"{kafka.prefix}compacted", f"{kafka.prefix}other"
    create(admin, compacted, cleanup_policy="compact")
    sent = [event(number, compacted, b"key" if number % 4 else None, b"value") for number in range(20)]
    sent += numbered(range(20, 40), [other])
    destination = opened(kafka)
    with pytest.raises(EventsRefused) as refused:
        deliver(destination, *sent)
    assert not refused.value.refused
    destination.close()
    destination.open()
    with pytest.raises(EventsRefused) as refused:
        deliver(destination, *sent)
    destination.close()
    progress = destination.open()
    rest = [one for one in sent if one.id not in refused.value.refused]
    deliver(destination, *rest)
    destination.close()

    assert set(refused.value.refused) == {one.id for one in sent[:20:4]}
    assert {type(error) for error in refused.value.refused.values()} == {EventRefused}
    assert progress is None
    assert {one.id for one in committed(kafka.address.plain, kafka.prefix)} == {one.id for one in rest}


def test_an_event_that_a_broker_refuses_is_a_dead_letter_and_others_are_delivered(
    kafka: SharedKafka, admin: AdminClient, tmp_path: Path
) -> None:
    create(admin, f"{kafka.prefix}orders", max_message_bytes="100000")
    writer = begin_log(tmp_path / "log")
    for position, size in enumerate([1, 300_000, 1, 1], 20):
        content = [(1, str(position)), (2, "x" * size)]
        commit_rows(writer, change(ORDERS, position, 0, str(position), after=content))
    destination = destination_at(kafka, compression="none")
    with LoopRun(tmp_path / "log", destination, batch=2, topic=f"{kafka.prefix}{{table}}") as loop:
        drain(loop)
        parked = [(int(letter.first.position), letter.code) for letter in loop.progress.parked.values()]

    assert parked == [(21, EventTooLarge.code)]
    assert [one.key for one in committed(kafka.address.plain, f"{kafka.prefix}orders")] == [
        b'["20"]',
        b'["22"]',
        b'["23"]',
    ]


def attempts(destination: KafkaDestination, sent: list[Event], refused: dict[str, CdcError]) -> int:
    """Deliver a batch as the loop does, without the events that are refused; how often it was sent."""
    for attempt in range(1, 10):
        destination.open()
        try:
            deliver(destination, *[one for one in sent if one.id not in refused])
        except EventsRefused as exc:
            refused |= exc.refused
            destination.close()
        else:
            return attempt
    raise AssertionError("the batch was not delivered")


def test_requests_get_smaller_until_a_topic_takes_them(kafka: SharedKafka, admin: AdminClient) -> None:
    topic = f"{kafka.prefix}orders"
    create(admin, topic, max_message_bytes="400000")
    destination, refused = destination_at(kafka, compression="none"), dict[str, CdcError]()
    sent = [event(number, topic, b"key", bytes(range(256)) * 250) for number in range(40)]
    sent[5] = event(5, topic, b"other", b"x" * 500_000)
    made = [attempts(destination, sent[first : first + 10], refused) for first in range(0, 40, 10)]
    destination.close()

    assert made[0] == 3
    assert made[-1] == 1
    assert {name: type(error) for name, error in refused.items()} == {sent[5].id: EventTooLarge}
    del sent[5]
    assert [one.id for one in committed(kafka.address.plain, topic)] == [one.id for one in sent]


def test_a_server_that_accepts_connections_and_does_not_answer_is_reported_in_time(kafka: SharedKafka) -> None:
    with create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        began = monotonic()
        error = failure(KafkaDestination(delivery(address, timeout="1s"), identity(kafka.prefix)))

    assert isinstance(error, DestinationUnavailable)
    assert address in error.message
    assert monotonic() - began < 10


@pytest.mark.slow
def test_a_broker_that_does_not_answer_is_reported_in_time(own_kafka: KafkaServer) -> None:
    destination = KafkaDestination(delivery(own_kafka.address.plain, timeout="2s"), identity("own"))
    destination.open()
    deliver(destination, event(1, "own.orders", b"key", b"value"))
    own_kafka.pause()
    began = monotonic()
    with pytest.raises(DestinationUnavailable):
        deliver(destination, event(2, "own.orders", b"key", b"value"))
    destination.close()
    assert isinstance(failure(destination), DestinationUnavailable)
    waited = monotonic() - began
    own_kafka.resume()
    progress: list[bytes | None] = []

    def is_delivered() -> bool:
        """The broker may still answer the earlier attempts to open the delivery, each of which ends the present one."""
        try:
            progress.append(destination.open())
            deliver(destination, event(2, "own.orders", b"key", b"value"))
        except DestinationUnavailable:
            destination.close()
            return False
        return True

    until(is_delivered, "the second event")
    destination.close()

    assert waited < 20
    assert set(progress) == {b"done"}
    assert [one.id for one in committed(own_kafka.address.plain, "own.")] == [
        event(number, "", None, None).id for number in (1, 2)
    ]


def test_a_broker_that_cannot_be_reached_is_named(kafka: SharedKafka) -> None:
    settings = delivery("127.0.0.1:1", timeout="1s")

    assert "127.0.0.1:1" in failure(KafkaDestination(settings, identity(kafka.prefix))).message


def test_a_transaction_that_took_too_long_is_sent_again(kafka: SharedKafka) -> None:
    opened(kafka).close()  # the first transaction of a broker takes longer than 1 s to begin
    destination = opened(kafka, timeout="1s", transaction_timeout="1s")
    sent = numbered(range(4), [f"{kafka.prefix}orders"])
    destination.send(sent[:2])

    def is_aborted() -> bool:
        try:
            destination.send(sent[2:3])
        except DestinationUnavailable as exc:
            return "longer than 1 s" in exc.message
        return False

    until(is_aborted, "a transaction that the broker has aborted")
    destination.close()
    destination.open()
    deliver(destination, *sent)
    destination.close()

    assert {one.id for one in committed(kafka.address.plain, kafka.prefix)} == {one.id for one in sent}


def test_a_transaction_timeout_that_brokers_do_not_take_is_named(kafka: SharedKafka) -> None:
    error = failure(destination_at(kafka, transaction_timeout="1d"))

    assert type(error) is DeliveryError
    assert "transaction.max.timeout.ms" in error.fix


def test_a_setting_that_the_client_does_not_know_is_named(kafka: SharedKafka) -> None:
    error = failure(destination_at(kafka, client={"no.such.setting": "1"}))

    assert type(error) is DeliveryError
    assert "no.such.setting" in error.message
    assert "'client'" in error.fix


def test_a_key_has_the_partition_that_a_java_client_chooses(kafka: SharedKafka) -> None:
    topic = f"{kafka.prefix}orders"
    sent = [event(number, topic, key, key) for number, key in enumerate(MURMUR2)]
    with closing(opened(kafka, topics={"partitions": 7})) as destination:
        deliver(destination, *sent)

    found = {one.key(): one.partition() for one in messages(kafka.address.plain, topic)}
    assert found == {key: (number & 0x7FFFFFFF) % 7 for key, number in MURMUR2.items()}


@pytest.mark.slow
def test_events_for_a_broker_that_does_not_answer_need_little_memory(own_kafka: KafkaServer) -> None:
    destination = KafkaDestination(delivery(own_kafka.address.plain, timeout="5s"), identity("own"))
    destination.open()
    batch = [event(number, "own.orders", b"key", bytes(range(256)) * 16) for number in range(500)]
    destination.send(batch)
    own_kafka.pause()
    before, sent = resident(), 0

    def send_all() -> None:
        nonlocal sent
        while sent < 100:
            destination.send(batch)
            sent += 1

    with pytest.raises(DestinationUnavailable):
        send_all()
    grown = resident() - before
    destination.close()
    own_kafka.resume()

    assert sent > 10
    assert grown < 70 << 20  # of 200 MiB


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def secure(kafka: SharedKafka, variable: str = "PASSWORD", **settings: Any) -> KafkaDestination:
    login = {"mechanism": "plain", "user": USER, "password": {"env": variable}}
    made = delivery(kafka.address.secure, login=login, **{"timeout": "5s", "tls": True, **settings})
    return KafkaDestination(made, identity(kafka.prefix))


def allow(admin: AdminClient, kind: ResourceType, prefix: str) -> None:
    """Let the user do everything with the resources whose names begin with a prefix."""
    given = (f"User:{USER}", "*", AclOperation.ALL, AclPermissionType.ALLOW)
    rule = AclBinding(kind, prefix, ResourcePatternType.PREFIXED, *given)
    admin.create_acls([rule])[rule].result(30)


def test_a_certificate_that_is_not_trusted_is_reported(kafka: SharedKafka) -> None:
    assert isinstance(failure(secure(kafka)), DestinationNotTrusted)


def test_a_certificate_is_not_checked_if_the_definition_says_so(kafka: SharedKafka) -> None:
    error = failure(secure(kafka, "WRONG", insecure_skip_tls_verification=True))

    assert isinstance(error, DestinationDenied)


def test_a_wrong_password_is_reported_without_the_password(kafka: SharedKafka) -> None:
    error = failure(secure(kafka, "WRONG", ca_file=kafka.address.ca_file))

    assert isinstance(error, DestinationDenied)
    assert "wrong" not in error.message


def test_a_check_finds_a_wrong_password_and_a_missing_topic(kafka: SharedKafka, admin: AdminClient) -> None:
    topic, progress = f"{kafka.prefix}orders", f"{kafka.prefix}progress"
    with pytest.raises(DestinationDenied):
        secure(kafka, "WRONG", ca_file=kafka.address.ca_file).check([topic])
    with pytest.raises(TopicMissing):
        destination_at(kafka, topics={"create": False}, progress_topic=progress).check([topic])
    destination_at(kafka, progress_topic=progress).check([topic])

    assert not {topic, progress} & admin.list_topics(timeout=30).topics.keys()


@pytest.mark.usefixtures("kafka_address")  # skips where no broker can be installed
def test_a_batch_that_a_new_leader_refused_comes_before_the_next_one(tmp_path: Path) -> None:
    address = KafkaServer(tmp_path / "own").address
    with closing(RefusingKafkaRelay(int(address.plain.rpartition(":")[2]))) as relay:
        seen = f"PLAIN://127.0.0.1:{relay.port},SECURE://{address.secure}"
        server = KafkaServer(tmp_path / "own", {"advertised.listeners": seen})
        server.start()
        destination = KafkaDestination(delivery(address.plain, topics={"partitions": 1}), identity("own"))
        sent = [event(1, "own.orders", b"key", b"first"), event(2, "own.orders", b"key", bytes(1 << 20))]
        destination.open()
        deliver(destination, *sent)
        destination.close()
        got = committed(address.plain, "own.orders")
        server.kill()

    assert relay.is_refused.is_set()
    assert [one.id for one in got] == [one.id for one in sent]


def test_a_missing_privilege_is_reported_and_the_delivery_continues_when_it_has_it(
    kafka: SharedKafka, admin: AdminClient
) -> None:
    topic, sent = f"{kafka.prefix}orders", event(1, f"{kafka.prefix}orders", b"key", b"value")
    destination = secure(kafka, ca_file=kafka.address.ca_file, progress_topic=f"{kafka.prefix}progress")
    without = failure(destination)
    allow(admin, ResourceType.TRANSACTIONAL_ID, f"cdc.{kafka.prefix}")
    without_topic = failure(destination)
    allow(admin, ResourceType.TOPIC, f"{kafka.prefix}progress")
    destination.open()
    with pytest.raises(DestinationDenied, match=topic):
        destination.send([sent])
    destination.close()
    allow(admin, ResourceType.TOPIC, kafka.prefix)
    destination.open()
    deliver(destination, sent)
    destination.close()
    destination.open()
    destination.close()

    assert isinstance(without, DestinationDenied)
    assert isinstance(without_topic, DestinationDenied)
    assert [one.id for one in committed(kafka.address.plain, topic)] == [sent.id]
