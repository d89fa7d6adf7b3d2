"""The keys of a search sink's server: what is accepted, and what is refused because it would be unsafe or wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cdc.config import SearchSinkDefinition

SERVER = {"url": "https://search.example.com:9200"}
CONTEXT = {"environment": {"KEY": "canary"}}


def sink(server: dict[str, Any] | None, **more: Any) -> SearchSinkDefinition:
    keys = {"type": "search", "name": "find", "engine": "opensearch", "server": server, **more}
    return SearchSinkDefinition.model_validate(keys, context=CONTEXT)


def test_a_server_needs_only_its_address():
    access = sink(SERVER).access

    assert (access.url, access.index, access.insecure_skip_tls_verification) == (
        "https://search.example.com:9200",
        "{schema}.{table}",
        False,
    )


def test_secrets_are_not_shown():
    shown = sink({**SERVER, "user": "cdc", "password": {"env": "KEY"}})

    assert shown.access.password is not None
    assert shown.access.password.reveal() == "canary"
    assert "canary" not in repr(shown) + shown.model_dump_json()


@pytest.mark.parametrize(
    ("server", "more", "message"),
    [
        (None, {}, "requires the key 'server'"),
        (SERVER, {"path": "/tmp/index"}, "has no key 'path'"),
        (SERVER, {"engine": "tantivy"}, "requires the key 'path'"),
        (None, {"engine": "tantivy", "path": "/tmp/index", "schema_changes": "rebuild"}, "rebuild' requires engine"),
        ({**SERVER, "password": "plain", "user": "cdc"}, {}, "in plain text"),
        ({**SERVER, "user": "cdc"}, {}, "require each other"),
        ({**SERVER, "user": "cdc", "password": {"env": "KEY"}, "api_key": {"env": "KEY"}}, {}, "exclude each other"),
        ({"url": "http://search.example.com", "api_key": {"env": "KEY"}}, {}, "unencrypted"),
        ({"url": "http://search.example.com", "aws": {"region": "eu-central-1"}}, {}, "unencrypted"),
        ({**SERVER, "aws": {"region": "eu-central-1"}, "api_key": {"env": "KEY"}}, {}, "'aws' excludes"),
        ({**SERVER, "aws": {}}, {}, "required"),
        ({"url": "https://cdc:secret@search.example.com"}, {}, "should match pattern"),
        ({**SERVER, "index": "all"}, {}, "expected {table}"),
        ({**SERVER, "index": "Shop-{table}"}, {}, "expected {table}"),
        ({**SERVER, "index": "-{table}"}, {}, "expected {table}"),
        ({**SERVER, "index": "{table}-{day}"}, {}, "unknown placeholder"),
        ({**SERVER, "mappings": {"properties": {"_position": {"type": "long"}}}}, {}, "a field of every index"),
        ({**SERVER, "bulk_requests": 0}, {}, "greater than or equal to 1"),
    ],
)
def test_a_mistake_is_refused_with_its_reason(server, more, message):
    with pytest.raises(ValidationError, match=message.replace("{", "\\{")) as refused:
        sink(server, **more)

    assert "canary" not in str(refused.value)


def test_two_servers_are_two_places():
    one, other = sink(SERVER), sink({**SERVER, "index": "shop-{table}"})

    assert one.location != other.location
