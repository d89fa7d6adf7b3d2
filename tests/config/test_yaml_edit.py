"""Edits of a definition's rules: they say what was asked, and every other character stays where it was."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config import load_definition
from cdc.config.yaml_edit import YamlEdit, add_tables, remove_tables, write_edit
from cdc.errors import ConfigError
from cdc.table import matches
from tests.fixtures.examples import examples

HEAD = "version: 1 # of this format\nname: shop\n\nsource:\n    dsn:   'postgresql://reader@db/shop'  # where\n"
TAIL = "log: {path:   log}  # kept as it is\n"

LAYOUTS = [
    "tables:\n  - match: shop.*   # all of it\n    exclude: []\n  # the end\n\nexclude: []  # none\n",
    "tables:\n- match: shop.*\n- match: 'other.t'\n\nexclude:\n- shop.big   # too big\n- \"shop.old\"\n\n# on\n",
    "tables: [{match: shop.*}, {match: 'other.t'}]\n",
    "tables:\n    -   match: shop.*\n        exclude:\n            - shop.big  # too big\n\n",
    "tables:\n  - {match: shop.*, exclude: [ shop.big,  shop.old ]}   # flow\n",
    "exclude: [\n  shop.big,  # too big\n  shop.old,\n]\ntables:\n  - match: shop.*\n",
]


def definition(folder: Path, rules: str) -> Path:
    path = folder / "shop.yaml"
    path.write_bytes(f"{HEAD}{rules}{TAIL}".encode())
    return path


def captured(path: Path, table: str) -> bool:
    found = load_definition(path)
    return matches(table, found.patterns) and not matches(table, found.excludes)


def lines_changed(edit: YamlEdit) -> list[str]:
    return [line for line in edit.diff.splitlines() if line[0] in "+-" and line[:3] not in {"+++", "---"}]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("rules", LAYOUTS)
def test_a_table_is_added_and_removed_in_any_layout_with_one_or_two_lines(
    tmp_path: Path, rules: str, newline: str
) -> None:
    path = definition(tmp_path, rules)
    path.write_bytes(path.read_bytes().replace(b"\n", newline.encode()))
    for table in ("far.away", "shop.big", "shop.orders"):
        for change, wanted in ((add_tables, True), (remove_tables, False), (add_tables, True)):
            edit = change(path, [table])
            write_edit(edit)
            assert captured(path, table) is wanted, (path.read_text(), table)
            assert len(lines_changed(edit)) <= 4
            assert edit.changes is bool(edit.diff) is bool(edit.done)
            kept = set(edit.before.splitlines()) - set(edit.after.splitlines())
            assert all("exclude" in line or "match" in line or "shop." in line for line in kept)
    text = path.read_bytes().decode()
    assert text.startswith(HEAD.replace("\n", newline))
    assert text.endswith(TAIL.replace("\n", newline))
    assert text.count("\r\n") == (text.count("\n") if newline == "\r\n" else 0)


def test_a_comment_stays_beside_what_it_was_written_for(tmp_path: Path) -> None:
    path = definition(tmp_path, LAYOUTS[0])
    write_edit(add_tables(path, ["far.away"]))
    write_edit(remove_tables(path, ["shop.big"]))
    assert (
        path.read_text()
        == HEAD
        + (
            "tables:\n  - match: shop.*   # all of it\n    exclude: []\n  - match: far.away\n  # the end\n\n"
            "exclude: [shop.big]  # none\n"
        )
        + TAIL
    )


def test_what_is_taken_out_was_named_exactly_and_what_a_glob_excludes_takes_a_person(tmp_path: Path) -> None:
    path = definition(tmp_path, "tables: [{match: shop.*}]\nexclude: [shop.*_old, shop.big]\n")
    with pytest.raises(ConfigError, match=r"excluded by 'shop\.\*_old'"):
        add_tables(path, ["shop.orders_old"])
    write_edit(add_tables(path, ["shop.big"]))
    assert load_definition(path).excludes == ["shop.*_old"]


NOTHING: list[tuple[Any, str]] = [(add_tables, "shop.orders"), (remove_tables, "far.away"), (remove_tables, "shop.big")]


@pytest.mark.parametrize(("change", "table"), NOTHING)
def test_nothing_is_done_where_the_rules_say_it_already(tmp_path: Path, change: Any, table: str) -> None:
    edit = change(definition(tmp_path, LAYOUTS[1]), [table])
    assert (edit.changes, edit.done, edit.diff) == (False, (), "")


def test_a_rule_for_a_glob_comes_and_goes_like_one_for_a_table(tmp_path: Path) -> None:
    path = definition(tmp_path, LAYOUTS[2])
    before = path.read_text()
    write_edit(add_tables(path, ["*.log", "far.[ab]"]))
    assert load_definition(path).patterns == ["shop.*", "other.t", "*.log", "far.[ab]"]
    write_edit(remove_tables(path, ["*.log", "far.[ab]"]))
    assert path.read_text() == before


def test_a_rule_with_exclusions_of_its_own_is_not_thrown_away(tmp_path: Path) -> None:
    path = definition(tmp_path, "tables:\n  - match: a.b\n    exclude: [c.d]\n  - match: c.*\n")
    write_edit(remove_tables(path, ["a.b"]))
    assert not captured(path, "c.d")
    assert not captured(path, "a.b")


WRONG: list[tuple[str, Any, Sequence[str], str]] = [
    ("tables: [{match: shop.t}]\n", remove_tables, ["shop.t"], "only rule"),
    ("tables: [{match: shop.t}]\n", add_tables, ["orders"], "malformed table"),
    ("tables: [{match: shop.t}]\n", add_tables, ["a.b\nlog: x"], "malformed table"),
    ("tables: [{match: shop.t}]\nlog: {}\n", add_tables, ["a.b"], "duplicate key"),
]


def test_a_definition_in_braces_takes_a_person(tmp_path: Path) -> None:
    path = tmp_path / "shop.yaml"
    path.write_text("{name: shop, source: {dsn: 'postgresql://a@b/c'}, tables: [{match: 'a.b'}], log: {path: log}}\n")
    with pytest.raises(ConfigError, match="safely"):
        add_tables(path, ["c.d"])


@pytest.mark.parametrize(("rules", "change", "tables", "said"), WRONG)
def test_what_cannot_be_edited_is_said_and_the_file_stays(
    tmp_path: Path, rules: str, change: Any, tables: Sequence[str], said: str
) -> None:
    path = definition(tmp_path, rules)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=said):
        change(path, tables)
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_written_stays_and_the_lines_are_told(tmp_path: Path) -> None:
    edit = add_tables(definition(tmp_path, LAYOUTS[0]), ["far.away"])
    edit.path.write_text(edit.before + "# more\n")
    with pytest.raises(ConfigError, match="another process has changed"):
        write_edit(edit)
    edit.path.unlink()
    edit.path.mkdir()
    with pytest.raises(ConfigError, match="cannot be written") as raised:
        write_edit(edit)
    assert "- match: far.away under 'tables'" in raised.value.fix


def test_a_file_keeps_its_mode_and_a_link_stays_a_link(tmp_path: Path) -> None:
    path = definition(tmp_path, LAYOUTS[0])
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    write_edit(add_tables(link, ["far.away"]))
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "shop.yaml"]  # noqa: PTH208 - hidden files count


NAMES = st.sampled_from(["shop.a", "shop.b", "x.a", "shop.*", "*.a", '"s.x".y', "we ird.t'able", "a.${HOME}", "ü.ä"])


@examples(10)
@given(st.sampled_from(LAYOUTS), st.lists(st.tuples(st.booleans(), NAMES), max_size=8))
def test_whatever_is_added_and_removed_the_file_says_the_last_word_on_each_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, rules: str, steps: list[tuple[bool, str]]
) -> None:
    path = definition(tmp_path_factory.mktemp("edit"), rules)
    for wanted, table in steps:
        before = path.read_bytes()
        try:
            write_edit((add_tables if wanted else remove_tables)(path, [table]))
        except ConfigError as exc:
            refused = exc.message
        else:
            assert "*" in table or captured(path, table) is wanted
            continue
        assert "excluded by" in refused or "only rule" in refused
        assert path.read_bytes() == before
