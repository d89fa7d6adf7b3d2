"""Topics and keys of logical messages (`pg_logical_emit_message`), by the rules of a delivery."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.deliveries import MessageTopic
from cdc.delivery.formats.contract import LogicalMessages
from cdc.errors import CdcError, EventNotEncodable
from cdc.log_row import Operation
from cdc.logical_message import message_prefixes


@dataclass(frozen=True, slots=True)
class RoutedMessages:
    """Messages of one topic."""

    indices: np.ndarray
    """Index of each message in the rows that were routed."""
    messages: LogicalMessages
    prefixes: Sequence[str]
    keys: Sequence[str] | None
    """Keys that the rule takes from the content; None if the key of a message is its prefix."""
    refusal: CdcError | None = None
    """Reason for which none of the messages can be sent."""

    def key(self, number: int) -> tuple[str | None, ...]:
        """Return the key of a message, by which events stay in order."""
        return ((self.prefixes if self.keys is None else self.keys)[number],)


class MessageRoutes:
    """The first rule that matches the prefix of a message applies to it."""

    def __init__(self, rules: Sequence[MessageTopic], pipeline: str) -> None:
        self._rules, self._pipeline = rules, pipeline

    def routed(self, rows: pa.Table) -> Iterator[RoutedMessages]:
        """Yield the messages among log rows, by topic; those that no rule matches are left out."""
        if not self._rules:
            return
        chosen = np.flatnonzero(pc.equal(rows["op"], Operation.MESSAGE.value).to_numpy())
        if not len(chosen):
            return
        own = rows.take(pa.array(chosen))
        prefixes = [prefix or "" for prefix in message_prefixes(own).to_pylist()]
        found: dict[tuple[int, str], list[int]] = {}
        for index, prefix in enumerate(prefixes):
            rule = next((n for n, one in enumerate(self._rules) if fnmatch.fnmatchcase(prefix, one.prefix)), None)
            if rule is not None:
                topic = self._rules[rule].topic.format(pipeline=self._pipeline, prefix=prefix)
                found.setdefault((rule, topic), []).append(index)
        for (rule, topic), places in sorted(found.items()):
            for part, keys, refusal in self._keyed(self._rules[rule].key, own, places):
                messages = LogicalMessages(topic, own.take(pa.array(part)).combine_chunks())
                yield RoutedMessages(chosen[part], messages, [prefixes[one] for one in part], keys, refusal)

    @staticmethod
    def _keyed(
        field: str | None, rows: pa.Table, places: list[int]
    ) -> Iterator[tuple[list[int], list[str] | None, CdcError | None]]:
        """Yield the messages that have a key, with the keys, and those that cannot be sent because they have none."""
        if field is None:
            yield places, None, None
            return
        keys = {place: _field(rows["payload"][place].as_py(), field) for place in places}
        if with_key := [place for place in places if keys[place] is not None]:
            yield with_key, [key for place in with_key if (key := keys[place]) is not None], None
        if without := [place for place in places if keys[place] is None]:
            reason = EventNotEncodable(f"the content of a message is no JSON object with the key field {field!r}")
            yield without, None, reason


def _field(content: bytes | None, name: str) -> str | None:
    """Return the text of a field of a JSON object; None if there is no such field, or if its value is null."""
    try:
        found = json.loads(content or b"")
    except ValueError:
        return None
    value = found.get(name) if isinstance(found, dict) else None
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
