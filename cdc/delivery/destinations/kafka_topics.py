"""Topics of a Kafka delivery: whether they exist, and how they are created."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from cdc.config.kafka import KafkaTopics
from cdc.delivery.destinations.kafka_client import ClientErrors
from cdc.errors import DeliveryError, TopicMissing

_NAME: Final = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9._-]{1,249}\Z")


def is_possible_name(topic: str) -> bool:
    """Return True if a topic can have this name."""
    return _NAME.match(topic) is not None


class TopicDirectory:
    """The topics that are known to exist."""

    def __init__(self, admin: AdminClient, settings: KafkaTopics, errors: ClientErrors, timeout: float) -> None:
        self._admin = admin
        self._settings = settings
        self._errors = errors
        self._timeout = timeout
        self.known: set[str] = set()

    def require(self, topics: Collection[str]) -> None:
        """Return when the topics exist; create those that are missing, or raise TopicMissing."""
        missing = self._missing(topics)
        if missing and not self._settings.create:
            raise TopicMissing(f"topic {missing[0]!r} does not exist")
        partitions, replication = self._settings.partitions or -1, self._settings.replication or -1
        self._create([NewTopic(name, partitions, replication, config=dict(self._settings.config)) for name in missing])
        self.known.update(topics)

    def check(self, topics: Collection[str]) -> None:
        """Raise TopicMissing if a topic is missing and would not be created."""
        missing = self._missing(topics)
        if missing and not self._settings.create:
            raise TopicMissing(f"topic {missing[0]!r} does not exist")

    def create_compacted(self, topic: str, config: Mapping[str, str]) -> bool:
        """Create the topic, with one partition that keeps the newest records; return False if it exists."""
        missing = self._missing([topic])
        if missing and not self._settings.create:
            raise TopicMissing(f"topic {topic!r} does not exist, which has the progress of the delivery")
        replication = self._settings.replication or -1
        settings = {"cleanup.policy": "compact", **config}
        if not missing:
            self._check_compacted(topic)
        return self._create([NewTopic(name, 1, replication, config=settings) for name in missing])

    def _check_compacted(self, topic: str) -> None:
        """Raise an error if the topic loses old records, as far as the delivery may see its settings."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        answer = self._admin.describe_configs([resource], request_timeout=self._timeout)[resource]
        try:
            policy = answer.result()["cleanup.policy"].value
        except KafkaException as exc:
            if exc.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                return
            raise self._meaning(exc, f"topic {topic!r} cannot be described") from exc
        if policy != "compact":
            raise DeliveryError(
                f"topic {topic!r} would lose the progress of the delivery: its 'cleanup.policy' is {policy!r}",
                remedy="set 'cleanup.policy' of the topic to 'compact', or choose another 'progress_topic'",
            )

    def _missing(self, topics: Collection[str]) -> list[str]:
        found = self._admin.describe_topics(TopicCollection(sorted(topics)), request_timeout=self._timeout)
        return [name for name, answer in found.items() if not self._exists(name, answer)]

    def _exists(self, name: str, answer: Any) -> bool:
        try:
            answer.result()
        except KafkaException as exc:
            if exc.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return False
            raise self._meaning(exc, f"topic {name!r} cannot be described") from exc
        return True

    def _create(self, topics: list[NewTopic]) -> bool:
        """Create the topics; return False if none has been created here."""
        if not topics:
            return False
        created = 0
        answers = self._admin.create_topics(topics, operation_timeout=self._timeout, request_timeout=self._timeout)
        for name, answer in answers.items():
            try:
                answer.result()
                created += 1
            except KafkaException as exc:
                # another process was faster
                if exc.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise self._meaning(exc, f"topic {name!r} cannot be created") from exc
        return created > 0

    def _meaning(self, exc: KafkaException, what: str) -> Exception:
        self._admin.poll(0)
        error = exc.args[0]
        if error.code() == KafkaError._TIMED_OUT:
            return self._errors.silence(what)
        return self._errors.meaning(error, what)
