"""load: what a sound definition means."""

from pathlib import Path

import pytest

from cdc.config import (
    Definition,
    DeltaSinkDefinition,
    SearchSinkDefinition,
    TypeSettings,
    WriterChoice,
    check_definition,
    load_definition,
    printable_definition,
)
from tests.config.definitions import SOUND, changed, write

CANARY = "c4n4ryS3cret"
DSN = f"postgresql://cdc:{CANARY}@localhost/shop"
SHOP = Path(__file__).parents[2] / "config" / "shop.yaml"


def with_dsn(value: str) -> str:
    return changed("postgresql://cdc@localhost/shop", value)


def test_defaults_are_named_after_the_pipeline_and_placed_beside_the_log(tmp_path: Path) -> None:
    definition = load_definition(write(tmp_path), {})
    assert definition.source.slot.name == "cdc_shop"
    assert definition.source.publication.name == "cdc_shop_pub"
    assert definition.source.heartbeat == 10.0
    assert definition.log.path == f"{tmp_path}/log"
    assert (definition.log.commit.bytes, definition.log.commit.linger) == (16 * 2**20, 0.05)
    assert definition.log.compact.every == definition.log.retain.grace == 3600
    assert definition.log.retain.max == 7 * 86400
    assert definition.spark.checkpoint == f"{tmp_path}/checkpoint"
    assert definition.catalog.url == f"sqlite:///{tmp_path}/catalog.db"
    assert (definition.service.host, definition.service.port) == ("127.0.0.1", 8083)
    assert definition.patterns == ["shop.*"]


@pytest.mark.parametrize(("every", "seconds"), [("off", 0.0), ("0", 0.0), ("90s", 90.0)])
def test_compaction_is_turned_off_by_its_name_or_by_nothing(tmp_path: Path, every: str, seconds: float) -> None:
    text = changed("  path: log", f"  path: log\n  compact: {{every: {every}}}")
    assert load_definition(write(tmp_path, text), {}).log.compact.every == seconds


def test_sinks_are_told_apart_by_their_type(tmp_path: Path) -> None:
    text = SOUND + "  - {name: find, type: search, path: find, tables: [shop.products], fields: [name]}\n"
    lake, find = load_definition(write(tmp_path, text), {}).sinks
    assert isinstance(lake, DeltaSinkDefinition)
    assert (lake.writer, lake.types, lake.tables) == (WriterChoice.AUTO, TypeSettings.EXACT, ("*.*",))
    assert isinstance(find, SearchSinkDefinition)
    assert (find.engine, find.fields, find.path) == ("tantivy", ("name",), f"{tmp_path}/find")


@pytest.mark.parametrize("value", ["${DB}", "{env: DB}", "{file: db.txt}", "postgresql://${USERPART}@localhost/shop"])
def test_a_secret_is_fetched_by_its_reference_and_never_printed(value: str, tmp_path: Path) -> None:
    secret_file = write(tmp_path, DSN + "\n", "db.txt")
    secret_file.chmod(0o600)
    checked = check_definition(write(tmp_path, with_dsn(value)), {"DB": DSN, "USERPART": f"cdc:{CANARY}"})
    definition = checked.definition
    assert definition is not None
    assert definition.source.dsn.reveal() == DSN
    shown = (
        repr(definition)
        + str(definition)
        + definition.model_dump_json()
        + repr(printable_definition(definition, checked.written))
    )
    assert CANARY not in shown
    assert checked.issues == ()


def test_a_secret_file_that_all_can_read_is_advice_and_stops_nothing(tmp_path: Path) -> None:
    write(tmp_path, DSN, "db.txt").chmod(0o644)
    checked = check_definition(write(tmp_path, with_dsn("{file: db.txt}")), {})
    (issue,) = checked.issues
    assert (issue.line, issue.fatal) == (3, False)
    assert checked.definition is not None


def test_the_earlier_name_of_a_writer_is_advice_and_means_its_present_name(tmp_path: Path) -> None:
    sink = "  - {name: found, type: delta, path: 'found/{table}', writer: delta-rs}\n"
    checked = check_definition(write(tmp_path, SOUND + sink), {})
    (issue,) = checked.issues
    assert (issue.key, issue.fatal) == ("sinks.1.writer", False)
    assert "write 'copy-on-write'" in issue.message
    assert checked.definition is not None
    (_, found) = checked.definition.sinks
    assert isinstance(found, DeltaSinkDefinition)
    assert found.writer is WriterChoice.COPY_ON_WRITE


@pytest.mark.parametrize(
    "value",
    [
        "postgresql:///shop?host=/run/postgresql",
        "postgres://u@[::1]:5433/shop",
        "postgresql://u@a:1,b:2/shop?target_session_attrs=primary",
        "host=localhost dbname=shop user='the one'",
        "service=shop",
        "postgresql://u@h/d?sslmode=verify-full",
    ],
)
def test_every_form_of_dsn_without_a_password_may_stand_in_the_file(value: str, tmp_path: Path) -> None:
    quoted = '"' + value + '"'
    assert load_definition(write(tmp_path, with_dsn(quoted)), {}).source.dsn.reveal() == value


def test_variables_take_defaults_and_plain_dollars_stay(tmp_path: Path) -> None:
    text = SOUND + "service: {port: '${PORT:-9000}'}\nspark: {conf: {a: '$${b} ${C}'}}\n"
    definition = load_definition(write(tmp_path, text), {"C": "d"})
    assert definition.service.port == 9000
    assert dict(definition.spark.conf) == {"a": "${b} d"}


def test_yaml_is_version_1_2(tmp_path: Path) -> None:
    text = changed("name: shop", "name: no") + "service: {port: 012}\n"
    definition = load_definition(write(tmp_path, b"\xef\xbb\xbf" + text.encode()), {})
    assert (definition.name, definition.service.port) == ("no", 12)


def test_durations_and_sizes_have_units(tmp_path: Path) -> None:
    text = changed(
        "path: log", "path: log\n  commit: {bytes: 1.5MiB, linger: 50ms}\n  segment: {bytes: 1024, every: 2d}"
    )
    log = load_definition(write(tmp_path, text), {}).log
    assert (log.commit.bytes, log.commit.linger) == (1_572_864, 0.05)
    assert (log.segment.bytes, log.segment.every) == (1024, 172_800.0)


def test_aliases_are_followed(tmp_path: Path) -> None:
    text = changed("- match: shop.*", "- match: &glob shop.*") + "    tables: [*glob]\n"
    assert load_definition(write(tmp_path, text), {}).sinks[0].tables == ("shop.*",)


def test_a_postgres_catalog_is_reached_by_psycopg_and_its_password_hidden(tmp_path: Path) -> None:
    text = SOUND + f"catalog: {{url: 'postgresql://cdc:{CANARY}@h/catalog'}}\n"
    checked = check_definition(write(tmp_path, text), {})
    assert checked.definition is not None
    assert checked.definition.catalog.url == f"postgresql+psycopg://cdc:{CANARY}@h/catalog"
    assert CANARY not in repr(checked.definition) + repr(printable_definition(checked.definition, checked.written))


def test_the_resolved_view_hides_settings_of_spark_that_are_secret(tmp_path: Path) -> None:
    text = SOUND + f"spark: {{conf: {{fs.s3a.secret.key: {CANARY}, a: '${{A}}', b: plain}}}}\n"
    checked = check_definition(write(tmp_path, text), {"A": CANARY})
    assert checked.definition is not None
    view = printable_definition(checked.definition, checked.written)
    assert view["spark"]["conf"] == {"fs.s3a.secret.key": "***", "a": "${A}", "b": "plain"}
    assert CANARY not in repr(checked.definition)


def test_the_resolved_view_is_itself_a_definition_that_means_the_same(tmp_path: Path) -> None:
    checked = check_definition(SHOP, {"SHOP_DSN": DSN, "CDC_HOME": str(tmp_path)})
    assert checked.definition is not None
    view = printable_definition(checked.definition, checked.written)
    context = {"environment": {}, "directory": tmp_path}
    view["source"]["dsn"] = DSN.replace(f":{CANARY}", "")
    again = Definition.model_validate(view, context=context)
    assert again.model_copy(update={"source": checked.definition.source}) == checked.definition
    assert again.source.heartbeat == checked.definition.source.heartbeat


def test_the_shipped_definition_comments_every_key_and_shows_every_default() -> None:
    checked = check_definition(SHOP, {"SHOP_DSN": DSN})
    assert checked.issues == ()
    assert set(checked.written) == set(Definition.model_fields)
    assert set(checked.written["spark"]) == set(Definition.model_fields["spark"].annotation.model_fields)  # type: ignore[union-attr]
    assert set(checked.written["sinks"][0]) == set(DeltaSinkDefinition.model_fields)
    assert set(checked.written["sinks"][1]) == set(SearchSinkDefinition.model_fields)


def test_a_definition_cannot_be_changed(tmp_path: Path) -> None:
    definition = load_definition(write(tmp_path), {})
    with pytest.raises(ValueError, match="frozen"):
        definition.name = "other"  # type: ignore[misc]
