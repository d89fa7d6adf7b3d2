"""Broken definitions: each issue is found, placed and worded, and no value is repeated."""

from pathlib import Path

import pytest

from cdc.config import check_definition, load_definition
from cdc.config.pydantic_errors import AUTO_CDC
from cdc.errors import ConfigError, InvalidDefinition, UnsetVariable
from tests.config.definitions import SOUND, changed, write

CANARY = "c4n4ryS3cret"
ENVIRONMENT = {"EMPTY": "", "SPACED": f"postgresql://u:{CANARY}@h/d ", "BROKEN": f"postgresql://u:{CANARY}%zz@h/d"}


def dsn(value: str) -> str:
    return changed("postgresql://cdc@localhost/shop", value)


DELTA = "    type: delta\n"
SEARCH = "  - {name: find, type: search, path: find}\n"

REMOTE = "catalog: {url: 'sqlite:///catalog.db'}\nspark: {checkpoint: work}\n"
"""What a log that is not on this machine needs."""

BROKEN: dict[str, tuple[str | bytes, str]] = {
    "misspelt top key": (changed("tables:", "tabels:"), '4:1: tabels: unknown key — did you mean "tables"?'),
    "missing top key": (changed("tables:\n  - match: shop.*\n", ""), "1:1: tables: required key is missing"),
    "misspelt key": (changed("  dsn", "  dns: x\n  dsn"), '3:3: source.dns: unknown key — did you mean "dsn"?'),
    "misspelt key of a sink": (
        changed(DELTA, DELTA + "    writter: auto\n"),
        '11:5: sinks.0.writter: unknown key — did you mean "writer"?',
    ),
    "misspelt type": (
        changed("type: delta", "type: detla"),
        "10:5: sinks.0.type: expected 'delta' or 'search' — did you mean \"delta\"?",
    ),
    "tables as names": (
        changed("  - match: shop.*", "  - shop.*"),
        "5:5: tables.0: expected a mapping of keys to values: write - match: shop.*",
    ),
    "tables as a name": (
        changed("tables:\n  - match: shop.*", "tables: shop.*"),
        "4:1: tables: expected a list: write [{match: shop.*}]",
    ),
    "mask under a sink": (
        changed(DELTA, DELTA + "    mask: {users: [email]}\n"),
        "11:5: sinks.0.mask: unknown key: write rules: [{match: shop.users, transform: {mask: {email: redact}}}]",
    ),
    "mask under a rule": (
        changed(DELTA, DELTA + "    rules: [{match: '*.*', mask: {email: redact}}]\n"),
        "11:28: sinks.0.rules.0.mask: unknown key: write transform: {mask: {email: redact}}",
    ),
    "no type": (changed(DELTA, ""), "9:5: sinks.0: required key is missing: type"),
    "misspelt choice": (
        changed(DELTA, DELTA + "    writer: sprak\n"),
        "11:5: sinks.0.writer: expected 'auto' or 'indexed' or 'copy-on-write' or 'spark' — did you mean \"spark\"?",
    ),
    "type policy of another name": (
        changed(DELTA, DELTA + "    types: reject\n"),
        "11:5: sinks.0.types: expected 'exact' or 'text': write 'exact', which rejects values",
    ),
    "type policy of a column by another name": (
        changed(DELTA, DELTA + "    columns: {price: reject}\n"),
        "11:15: sinks.0.columns.price: expected 'exact' or 'text': write 'exact'",
    ),
    "key of AUTO CDC in a sink": (
        changed(DELTA, DELTA + "    keys: [id]\n"),
        "11:5: sinks.0.keys: unknown key: not needed, because every row of the log contains this information",
    ),
    "key of AUTO CDC in a rule": (
        changed(DELTA, DELTA + "    rules: [{match: '*.*', sequence_by: seen_at}]\n"),
        (
            "11:28: sinks.0.rules.0.sequence_by: unknown key: not needed, because every row of the log contains "
            "this information"
        ),
    ),
    "key of AUTO CDC where none of it belongs": (
        changed("  dsn", "  keys: [id]\n  dsn"),
        "3:3: source.keys: unknown key",
    ),
    "duplicate key": (SOUND + "name: again\n", "12:1: name: duplicate key, first in line 1"),
    "tab": (SOUND + "spark:\n\ttrigger: 1s\n", "13:1: indentation by tabs is not allowed: use spaces"),
    "empty file": ("", "1:1: the file is empty"),
    "only a comment": ("# nothing\n", "1:1: the file is empty"),
    "a list": ("- a\n", "1:1: expected a mapping of keys to values"),
    "not UTF-8": (SOUND.encode() + b"# \xff\n", "12:3: the file is not UTF-8"),
    "control character": (SOUND + "# \x07\n", "12:3: character U+0007 is not allowed in YAML"),
    "too large": ("# " + "x" * 1024 * 1024, "1:1: the file is larger than 1024 KiB"),
    "open bracket": (SOUND + "exclude: [a.b\n", "13:1: while parsing a flow sequence"),
    "object tag": (changed("name: shop", "name: !!python/object/apply:os.system [id]"), "1:1: name: YAML tags are not"),
    "merge key": (SOUND + "spark:\n  <<: {}\n", "13:3: spark.<<: merge keys"),
    "null": (changed("name: shop", "name:"), "1:1: name: expected text: put quotes around the value"),
    "number for text": (changed("name: shop", "name: 12"), "1:1: name: expected text: put quotes around the value"),
    "bad name": (changed("name: shop", "name: Shop-1"), "1:1: name: expected at most 40 characters of a-z, 0-9 and _"),
    "yes": (
        changed("  dsn", "  slot: {create: yes}\n  dsn"),
        "3:10: source.slot.create: expected true or false",
    ),
    "slot in capitals": (
        changed("  dsn", "  slot: {name: Bad-Name}\n  dsn"),
        "3:10: source.slot.name: expected 1 to 63 characters of a-z, 0-9 and _",
    ),
    "slot too long": (
        changed("  dsn", f"  slot: {{name: {'x' * 64}}}\n  dsn"),
        "3:10: source.slot.name: expected 1 to",
    ),
    "duration without unit": (
        changed("  dsn", "  heartbeat: 10\n  dsn"),
        "3:3: source.heartbeat: expected a duration with its unit: 100ms, 10s, 5m, 1h or 7d",
    ),
    "size with a wrong unit": (
        changed("  path: log", "  path: log\n  commit: {bytes: 16 Mib}"),
        "8:12: log.commit.bytes: expected a size: 16MiB, 10GB or a number of bytes",
    ),
    "size of nothing": (
        changed("  path: log", "  path: log\n  commit: {bytes: 0}"),
        "8:12: log.commit.bytes: expected more than 0",
    ),
    "no compaction in other words": (
        changed("  path: log", "  path: log\n  compact: {every: never}"),
        "8:13: log.compact.every: expected a duration with its unit: 100ms, 10s, 5m, 1h or 7d",
    ),
    "retention of nothing": (
        changed("  path: log", "  path: log\n  retain: {max: 0}"),
        "8:12: log.retain.max: expected more than 0",
    ),
    "glob without schema": (
        changed("shop.*", "orders"),
        "5:5: tables.0.match: expected a glob over schema.table, for example shop.*",
    ),
    "no tables": (changed("tables:\n  - match: shop.*", "tables: []"), "4:1: tables: expected at least one entry"),
    "text for a list": (changed("tables:\n  - match: shop.*", "tables: shop.*"), "4:1: tables: expected a list"),
    "text for a mapping": (changed("log:\n  path: log", "log: log"), "6:1: log: expected a mapping of keys to values"),
    "path without table": (
        changed("lake/{schema}/{table}", "lake/{schema}"),
        "11:5: sinks.0.path: expected {table} in the path, because every table has its own directory",
    ),
    "function without its module": (
        changed("{table}", "{table}\n    rules: [{match: shop.orders, transform: {python: rules}}]"),
        "12:46: sinks.0.rules.0.transform.python: expected module:function, for example company.rules:users",
    ),
    "name with a sign in it": (
        changed("{table}", "{table}\n    rules: [{match: shop.orders, transform: {computed: {b-c: id}}}]"),
        "12:57: sinks.0.rules.0.transform.computed.b-c.…: expected at most 63 characters of A-Z, a-z, 0-9 and _",
    ),
    "unknown placeholder": (
        changed("{schema}/{table}", "{db}/{table}"),
        "11:5: sinks.0.path: unknown placeholder: expected {schema} or {table}",
    ),
    "open brace": (changed("{table}", "{table"), "11:5: sinks.0.path: unbalanced braces"),
    "path without schema over many": (
        changed("{schema}/", "").replace("shop.*", "'*.*'"),
        "11:5: sinks.0.path: expected {schema} in the path",
    ),
    "unknown store": (
        changed("path: log", "path: ftp://h/log"),
        "7:3: log.path: expected a local path or one of s3://, s3a://, gs://, abfss://, file://",
    ),
    "signals of no schema": (
        SOUND + "snapshot: {signals: debezium_signal}\n",
        "12:12: snapshot.signals: expected schema.table, for example public.debezium_signal",
    ),
    "signals that nobody captures": (
        SOUND + "snapshot: {signals: public.signals}\n",
        "12:12: snapshot.signals: no rule captures this table: add the table to 'tables'",
    ),
    "signals that are excluded": (
        SOUND + "exclude: [shop.sig*]\nsnapshot: {signals: shop.signals}\n",
        "13:12: snapshot.signals: no rule captures this table: add the table to 'tables'",
    ),
    "duplicate sink": (SOUND + SEARCH.replace("find,", "lake,", 1), "12:6: sinks.1.name: another sink has this name"),
    "duplicate rule": (
        changed("  - match: shop.*\n", "  - match: shop.*\n  - match: shop.*\n"),
        "6:5: tables.1.match: another rule has this glob",
    ),
    "sink inside the log": (
        changed("lake/{schema}", "log/{schema}"),
        "11:5: sinks.0.path: the path up to its first placeholder overlaps the directory of the log",
    ),
    "index in a bucket": (
        SOUND + "  - {name: find, type: search, path: 's3://lake/find'}\n",
        "12:32: sinks.1.path: expected a local directory: a search index cannot be in an object store",
    ),
    "remote log without catalog": (
        changed("path: log", "path: s3://lake/log") + "spark: {checkpoint: work}\n",
        "1:1: catalog: required key is missing: catalog.url, because the log is in an object store",
    ),
    "remote log without checkpoint": (
        changed("path: log", "path: s3://lake/log") + "catalog: {url: 'sqlite:///catalog.db'}\n",
        "1:1: spark: required key is missing: spark.checkpoint, because the log is in an object store",
    ),
    "remote checkpoint": (
        SOUND + "spark: {checkpoint: 's3://lake/work'}\n",
        "12:9: spark.checkpoint: expected a local directory",
    ),
    "storage of a directory": (
        changed("path: log", "path: log\n  storage: {region: eu}"),
        "8:13: log.storage.region: has no effect: log.path is a local directory",
    ),
    "storage of another store": (
        changed("path: log", "path: s3://lake/log\n  storage: {account_name: a}") + REMOTE,
        "8:13: log.storage.account_name: has no effect: log.path is in a store of s3://",
    ),
    "endpoint without encryption": (
        changed("path: log", "path: s3://lake/log\n  storage: {endpoint: 'http://h:9000'}") + REMOTE,
        (
            "8:13: log.storage.endpoint: an http:// endpoint sends access keys unencrypted: "
            "use https://, or add allow_http: true"
        ),
    ),
    "endpoint that is no URL": (
        changed("path: log", "path: s3://lake/log\n  storage: {endpoint: 'h:9000'}") + REMOTE,
        "8:13: log.storage.endpoint: expected a URL that begins with https:// or http://",
    ),
    "key of a store in the file": (
        changed("path: log", "path: s3://lake/log\n  storage: {secret_access_key: abcdef}") + REMOTE,
        "8:13: log.storage.secret_access_key: an access key is in plain text in the definition",
    ),
    "port out of range": (SOUND + "service: {port: 70000}\n", "12:11: service.port: expected at most 65535"),
    "true for a port": (SOUND + "service: {port: true}\n", "12:11: service.port: expected a whole number"),
    "share of nothing": (
        changed(DELTA, DELTA + "    dead_letters: {ratio: 0}\n"),
        "11:20: sinks.0.dead_letters.ratio: expected more than 0",
    ),
    "share in percent": (
        changed(DELTA, DELTA + "    dead_letters: {ratio: 5}\n"),
        "11:20: sinks.0.dead_letters.ratio: expected at most 1",
    ),
    "share with its sign": (
        changed(DELTA, DELTA + "    dead_letters: {ratio: 5%}\n"),
        "11:20: sinks.0.dead_letters.ratio: expected a number, for example 0.05",
    ),
    "other catalog": (SOUND + "catalog: {url: 'mysql://h/d'}\n", "12:11: catalog.url: expected a URL that begins"),
    "other version": ("version: 2\n" + SOUND, "1:1: version: expected '1'"),
    "unset variable": (dsn("${NOT_THERE}"), "3:3: source.dsn: environment variable 'NOT_THERE' is not set"),
    "empty variable": (dsn("${EMPTY}"), "3:3: source.dsn: environment variable 'EMPTY' is empty"),
    "unset secret": (dsn("{env: NOT_THERE}"), "3:3: source.dsn: environment variable 'NOT_THERE' is not set"),
    "missing secret file": (dsn("{file: nowhere}"), "3:3: source.dsn: secret file cannot be read: no such file"),
    "unknown reference": (dsn("{enw: X}"), "3:3: source.dsn: expected ${VAR}, {env: VAR} or {file: PATH}"),
    "open variable": (dsn("${OPEN"), "3:3: source.dsn: malformed variable: expected ${NAME}"),
    "secret with white space": (
        dsn("{env: SPACED}"),
        "3:3: source.dsn: the value of the secret begins or ends with white space",
    ),
    "bad escape": (
        dsn("${BROKEN}"),
        "3:3: source.dsn: the DSN contains a '%' without two hexadecimal digits after it: write it as %25",
    ),
    "password in the file": (
        dsn(f"postgresql://u:{CANARY}@h/d"),
        "3:3: source.dsn: the password is in plain text in the definition",
    ),
    "password with @": (dsn(f"postgresql://u:{CANARY}@x@h/d"), "3:3: source.dsn: malformed DSN: write @ / ? #"),
    "space in a DSN": (dsn(f"'postgresql://u:{CANARY} x@h/d'"), "3:3: source.dsn: the DSN contains white space"),
    "no DSN": (dsn(CANARY), "3:3: source.dsn: malformed DSN: expected postgresql://user@host/database"),
    "sslmode": (
        dsn("postgresql://u@h/d?sslmode=verify-fulll"),
        "3:3: source.dsn: unknown sslmode: expected one of disable, allow",
    ),
    "port in a DSN": (dsn(f"postgresql://u@h:{CANARY}/d"), "3:3: source.dsn: invalid port in the DSN"),
    "secret as a key": (dsn(f"{{'postgresql://{CANARY}': x}}"), "3:3: source.dsn: expected ${VAR}"),
    "secret as an unknown key": (SOUND + f"'p:{CANARY}@h': x\n", "12:1: …: unknown key"),
    "secret as a choice": (changed("delta\n", f"{CANARY}\n"), "10:5: sinks.0.type: expected 'delta' or 'search'"),
    "secret as a name": (changed("name: lake", f"name: {CANARY}"), "9:5: sinks.0.name: expected at most 40"),
    "text for a setting": (SOUND + "spark: {conf: {a: 1}}\n", "12:16: spark.conf.a: expected text"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_definition_is_named_with_place_and_reason_and_no_value_is_repeated(case: str, tmp_path: Path) -> None:
    text, expected = BROKEN[case]
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_definition(path, ENVIRONMENT)
    assert str(caught.value).startswith(f"{path}:{expected}")
    assert len(caught.value.issues) == 1
    assert CANARY not in repr(caught.value.issues)
    assert caught.value.exit_code.value == 2


def test_of_each_word_of_auto_cdc_that_there_is_not_the_reason_is_given(tmp_path: Path) -> None:
    text = changed(DELTA, DELTA + "".join(f"    {word}: x\n" for word in AUTO_CDC))
    issues = check_definition(write(tmp_path, text), ENVIRONMENT).issues

    found = {issue.key: (issue.message, issue.suggestion) for issue in issues}
    assert found == {f"sinks.0.{word}": (f"unknown key: {reason}", None) for word, reason in AUTO_CDC.items()}


def test_all_flaws_are_found_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = changed("name: shop", "name: 1").replace("match:", "mach:").replace("path: log", "path: ${GONE}")
    issues = check_definition(write(tmp_path, text), {}).issues
    assert [(issue.line, issue.key) for issue in issues] == [
        (1, "name"),
        (5, "tables.0.mach"),
        (7, "log.path"),
    ]


def test_a_bomb_of_aliases_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (issue,) = check_definition(write(tmp_path, "\n".join(lines)), {}).issues
    assert issue.message == "the file is too large: it has more than 50000 values, with aliases expanded"


def test_an_alias_of_itself_is_refused(tmp_path: Path) -> None:
    (issue,) = check_definition(write(tmp_path, "a: &a [*a]\n"), {}).issues
    assert issue.line == 1


def test_a_missing_file_is_a_issue_of_its_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidDefinition, match="cannot be read: no such file or directory"):
        load_definition(tmp_path / "none.yaml", {})


def test_nothing_but_unset_variables_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(UnsetVariable):
        load_definition(write(tmp_path, dsn("${NOT_THERE}")), {})
