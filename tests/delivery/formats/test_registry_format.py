"""Events in Avro with a schema registry, against a registry over HTTP."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from fastavro import parse_schema, schemaless_reader
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from pydantic import ValidationError

from cdc.config.deliveries import DeliverySettings, EventEncoding, EventFormat, SchemaRegistryAccess
from cdc.config.secret import Secret
from cdc.delivery.formats import new_format
from cdc.delivery.formats.contract import Format, LogicalMessages
from cdc.errors import DestinationDenied, DestinationNotTrusted, DestinationUnavailable, EventSchemaRejected, Reaction
from tests.delivery.formats.changes import (
    ID,
    NAMES,
    TOPIC,
    changes_of,
    column,
    debezium_options,
    log_row,
    log_rows,
    schema_with,
)
from tests.delivery.formats.proto_text import parsed_proto
from tests.fixtures.schema_registry import RegistryState, running_registry

SCHEMA = schema_with(ID, column("price", 1700, "numeric", typmod=(5 << 16 | 2) + 4), column("note", not_null=True))
ROW = {1: "1", 2: "1.10", 3: "x"}


@pytest.fixture
def registry() -> Iterator[tuple[str, RegistryState]]:
    """URL and state of a registry."""
    with running_registry() as found:
        yield found


def _format(url: str, name: str = "debezium", encoding: EventEncoding = EventEncoding.AVRO, **access: Any) -> Format:
    settings = DeliverySettings(
        name="out",
        format=EventFormat(name),
        encoding=encoding,
        schema_registry=SchemaRegistryAccess.model_validate({"url": url, "timeout": "5s", **access}),
        **debezium_options(name, schemas=True),
    )
    return new_format(settings, NAMES)


def read_avro(state: RegistryState, message: bytes | None) -> Any:
    """What a consumer reads: the schema from the registry, then the content."""
    if message is None:
        return None
    assert message[0] == 0
    schema = json.loads(state.schemas[int.from_bytes(message[1:5], "big") - 1]["schema"])
    return schemaless_reader(BytesIO(message[5:]), parse_schema(schema), None)


def test_events_are_avro_with_the_id_of_their_schema(registry: tuple[str, RegistryState]) -> None:
    url, state = registry
    encoder = _format(url)
    rows = log_row("c", 0, key=["1"], after=ROW), log_row("d", 1, key=["1"], before={1: "1"})
    events = encoder.encode(changes_of(SCHEMA, *rows))
    created, deleted, tombstone = (read_avro(state, message) for message in events.values.to_pylist())
    assert str(created["after"]["price"]) == "1.10"
    assert (created["op"], created["before"], created["after"]["note"]) == ("c", None, "x")
    assert deleted["before"] == {"id": 1, "price": None, "note": ""}
    assert tombstone is None
    assert [read_avro(state, message) for message in events.keys.to_pylist()] == [{"id": 1}] * 3
    assert set(state.subjects) == {f"{TOPIC}-key", f"{TOPIC}-value"}
    encoder.encode(changes_of(SCHEMA, *rows))
    assert len(state.requests) == 2


@pytest.mark.parametrize("name", ["flat", "cdc"])
def test_other_formats_have_schemas_of_their_own(registry: tuple[str, RegistryState], name: str) -> None:
    url, state = registry
    rows = log_row("c", 0, key=["1"], after=ROW), log_row("u", 1, key=["1"], after={1: "1", 2: None}, partial=True)
    encoder = _format(url, name)
    events = encoder.encode(changes_of(SCHEMA, *rows))
    first, second = (read_avro(state, message) for message in events.values.to_pylist())
    if name == "cdc":
        assert first["after"] == {"id": "1", "price": "1.10", "note": "x"}
        assert second["unchanged"] == ["note"]
        assert read_avro(state, events.keys[0].as_py()) == {"id": "1"}
        other = schema_with(column("code", key=0), column("anything", 16, "boolean"))
        encoder.encode(changes_of(other, log_row("c", key=["a"], after={1: "a", 2: "t"})))
        assert len(state.requests) == 2
    else:
        assert (str(first["price"]), first["__op"], second["__deleted"]) == ("1.10", "c", "false")
        assert second["note"] == "__debezium_unavailable_value"


@pytest.mark.parametrize("name", ["debezium", "flat", "cdc"])
def test_many_events_have_the_content_that_each_has_alone(registry: tuple[str, RegistryState], name: str) -> None:
    url, _ = registry
    encoder = _format(url, name)
    rows = [
        log_row("cd"[n % 2], n, key=[str(n)], **{("after", "before")[n % 2]: {**ROW, 1: str(n)}}) for n in range(120)
    ]
    together = encoder.encode(changes_of(SCHEMA, *rows))
    alone = [encoder.encode(changes_of(SCHEMA, one)) for one in rows]

    assert together.keys.to_pylist() == [key for one in alone for key in one.keys.to_pylist()]
    found = [value for one in alone for value in one.values.to_pylist()]
    assert [one is None for one in together.values.to_pylist()] == [one is None for one in found]
    if name != "debezium":  # its envelope has the time of encoding
        assert together.values.to_pylist() == found


@pytest.mark.parametrize("name", ["debezium", "flat", "cdc"])
def test_messages_are_avro(registry: tuple[str, RegistryState], name: str) -> None:
    url, state = registry
    rows = log_rows([log_row("m", relation=None, topic=None, payload=b"\xff", key=["p", "t", "0/A"])])
    events = _format(url, name).encode_messages(LogicalMessages("shop.m", rows))
    value = read_avro(state, events.values[0].as_py())
    assert (value.get("message") or value)["content"] == b"\xff"
    assert read_avro(state, events.keys[0].as_py()) == {"prefix": "p"}


@pytest.mark.parametrize("name", ["debezium", "flat", "cdc"])
def test_events_are_protobuf_with_the_path_of_their_message(registry: tuple[str, RegistryState], name: str) -> None:
    url, state = registry
    encoder = _format(url, name, EventEncoding.PROTOBUF)
    events = encoder.encode(changes_of(SCHEMA, log_row("c", key=["1"], after=ROW)))
    content = events.values[0].as_py()
    assert (content[:1], content[5:6]) == (b"\0", b"\0")
    schema = state.schemas[int.from_bytes(content[1:5], "big") - 1]
    assert schema["schemaType"] == "PROTOBUF"
    file = parsed_proto(schema["schema"])
    pool = DescriptorPool()
    pool.Add(file)
    message = GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{file.message_type[0].name}"))
    found = message.FromString(content[6:])
    if name == "cdc":
        assert [(one.key, one.value) for one in found.after.items] == [("id", "1"), ("price", "1.10"), ("note", "x")]
    else:
        assert (found if name == "flat" else found.after).price == b"\x6e"
    rows = log_rows([log_row("m", relation=None, topic=None, payload=b"x", key=["p", "t", "0/A"])])
    assert encoder.encode_messages(LogicalMessages("shop.m", rows)).values[0].as_py()[5:6] == b"\0"


def test_an_incompatible_schema_stops_the_delivery_until_it_is_accepted(registry: tuple[str, RegistryState]) -> None:
    url, state = registry
    encoder = _format(url, "flat")
    encoder.encode(changes_of(SCHEMA, log_row("c", key=["1"], after=ROW)))
    wider = schema_with(*SCHEMA.columns, column("added", 23, "integer", not_null=True))
    changes = changes_of(wider, log_row("c", key=["1"], after={**ROW, 4: "5"}))
    with pytest.raises(EventSchemaRejected, match=f"subject '{TOPIC}-value': Schema being registered") as caught:
        encoder.encode(changes)
    assert caught.value.reaction is Reaction.RETRY
    state.subjects.clear()
    assert read_avro(state, encoder.encode(changes).values[0].as_py())["added"] == 5


def test_a_new_nullable_column_is_compatible(registry: tuple[str, RegistryState]) -> None:
    url, state = registry
    encoder = _format(url)
    encoder.encode(changes_of(SCHEMA, log_row("c", key=["1"], after=ROW)))
    wider = schema_with(*SCHEMA.columns, column("added", 23, "integer"))
    events = encoder.encode(changes_of(wider, log_row("c", key=["1"], after={**ROW, 4: "5"})))
    assert read_avro(state, events.values[0].as_py())["after"]["added"] == 5
    assert len(state.subjects[f"{TOPIC}-value"]) == 2


def test_errors_of_the_registry_say_what_failed(registry: tuple[str, RegistryState]) -> None:
    url, state = registry
    changes = changes_of(SCHEMA, log_row("c", key=["1"], after=ROW))
    state.status = 500
    with pytest.raises(DestinationUnavailable, match="Error in the backend data store"):
        _format(url).encode(changes)
    state.status = 422
    with pytest.raises(EventSchemaRejected):
        _format(url).encode(changes)
    state.status, state.login = None, ("cdc", "right")
    with pytest.raises(DestinationDenied, match="Unauthorized"):
        _format(url, user="cdc", password=Secret("wrong", "${X}")).encode(changes)
    events = _format(url, user="cdc", password=Secret("right", "${X}")).encode(changes)
    assert read_avro(state, events.values[0].as_py())["op"] == "c"


def test_a_registry_that_does_not_run_is_unavailable() -> None:
    with running_registry() as (url, _):
        encoder = _format(url)
    with pytest.raises(DestinationUnavailable, match="schema registry http://127"):
        encoder.encode(changes_of(SCHEMA, log_row("c", key=["1"], after=ROW)))


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Key and certificate for localhost."""
    key, chain = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(chain)], check=True, capture_output=True)
    return key, chain


def test_the_certificate_of_the_registry_is_verified(certificate: tuple[Path, Path]) -> None:
    changes = changes_of(SCHEMA, log_row("c", key=["1"], after=ROW))
    with running_registry(certificate) as (url, state):
        with pytest.raises(DestinationNotTrusted):
            _format(url).encode(changes)
        assert state.requests == []
        events = _format(url, ca_file=str(certificate[1])).encode(changes)
        assert read_avro(state, events.values[0].as_py())["op"] == "c"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoding": "avro"}, "'schema_registry' is required"),
        (
            {"encoding": "avro", "format": "cloudevents", "schema_registry": {"url": "http://r"}},
            "'cloudevents' is JSON",
        ),
        ({"schema_registry": {"url": "http://r", "user": "a"}}, "'user' and 'password' belong together"),
        ({"schema_registry": {"url": "http://r", "user": "a", "password": "plain"}}, "in plain text"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DeliverySettings.model_validate({"name": "out", **settings})
