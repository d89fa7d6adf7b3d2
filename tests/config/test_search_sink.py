"""Search sinks of a definition: a local index and indexes on a server, which are two kinds of sink."""

from __future__ import annotations

from cdc.config import SearchSinkDefinition
from cdc.table import Column, ReplicaIdentity, TableSchema

LOCAL = SearchSinkDefinition.model_validate(
    {"type": "search", "name": "find", "path": "/find", "fields": ["mail"], "except_column_list": ["note"]}
)
REMOTE = SearchSinkDefinition.model_validate(
    {"type": "search", "name": "far", "engine": "opensearch", "server": {"url": "http://127.0.0.1:9200"}}
)
USERS = TableSchema(
    relation=1,
    oid=1,
    schema="shop",
    name="users",
    replica_identity=ReplicaIdentity.DEFAULT,
    columns=tuple(
        Column(id=number, name=name, type_oid=25, type_name="text", key=0 if name == "id" else None)
        for number, name in enumerate(("id", "mail", "note", "town"), 1)
    ),
)


def test_a_local_index_is_one_target_in_a_directory_that_only_the_driver_writes() -> None:
    assert (LOCAL.kind, LOCAL.product, LOCAL.location, LOCAL.own_directory) == ("search", "tantivy", "/find", "/find")
    assert LOCAL.has_one_target
    assert LOCAL.only_the_driver_writes
    assert not LOCAL.normalizes_json


def test_indexes_on_a_server_are_a_target_for_each_table_in_no_directory() -> None:
    assert (REMOTE.kind, REMOTE.product, REMOTE.directory) == ("search_server", "opensearch", "")
    assert REMOTE.location == f"http://127.0.0.1:9200/{REMOTE.access.index}"
    assert not REMOTE.has_one_target
    assert not REMOTE.only_the_driver_writes
    assert REMOTE.normalizes_json


def test_an_index_has_its_key_and_the_selected_columns() -> None:
    assert [column.name for column in LOCAL.selected_columns(USERS).columns] == ["id", "mail"]
    assert [column.name for column in REMOTE.selected_columns(USERS).columns] == ["id", "mail", "note", "town"]


def test_an_index_keeps_no_history_and_needs_no_spark() -> None:
    for sink in (LOCAL, REMOTE):
        assert sink.keeps_history is None
        assert not sink.opens_with_spark
        assert not sink.rules_need_spark
        assert sink.shared_path(USERS) is None
