"""Schemas of Kafka Connect as its JSON converter writes them."""

from __future__ import annotations

from cdc.delivery.formats.connect_schema import ConnectSchema, key_schema, logical, optional, scalar


def test_the_members_are_in_the_order_of_the_json_converter() -> None:
    schema = ConnectSchema(
        type="bytes", name="n", version=2, doc="d", parameters=(("scale", "3"),), optional=True, default='"AA=="'
    )
    assert schema.to_json("f") == (
        '{"type":"bytes","optional":true,"name":"n","version":2,"doc":"d","parameters":{"scale":"3"},'
        '"default":"AA==","field":"f"}'
    )


def test_nested_schemas_come_after_the_type() -> None:
    array = ConnectSchema(type="array", items=optional("int32"))
    assert array.to_json() == '{"type":"array","items":{"type":"int32","optional":true},"optional":false}'
    mapping = ConnectSchema(type="map", keys=scalar("string"), items=array.as_optional())
    assert mapping.to_json().startswith('{"type":"map","keys":{"type":"string","optional":false},"values":{"type":"arr')
    assert key_schema("t", (("id", logical("string", "u")),)).to_json() == (
        '{"type":"struct","fields":[{"type":"string","optional":false,"name":"u","version":1,"field":"id"}],'
        '"optional":false,"name":"t.Key"}'
    )
