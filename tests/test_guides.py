"""The pages: their definitions are valid, their commands are ours and take the arguments, their SQL runs.

`test_readme.py` follows the guide for an own Postgres step by step, and `cli/test_spark.py` that of the cluster.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import pytest
from ruamel.yaml import YAML
from typer._click.exceptions import MissingParameter, UsageError
from typer.main import get_command

from cdc.cli.app import application
from cdc.config import check_definition
from cdc.demo.shop_workload import make_shop
from cdc.postgres.embedded_server import EmbeddedPostgres

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = sorted([ROOT / "README.md", *(ROOT / "cdc").rglob("README.md"), *(ROOT / "deploy").rglob("*.md")])
OF_OTHERS: Final = {"scrape_configs"}
"""Keys of configurations that other programs read; `deploy/prometheus` has tests of its own."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    """The fenced blocks of all pages, without their indentation."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^( *)```(\w+)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
            indent, language, content = match.groups()
            line = text.count("\n", 0, match.start()) + 2
            content = re.sub(f"^{indent}", "", content, flags=re.MULTILINE)
            yield Block(page.relative_to(ROOT).as_posix(), line, language, content)


BLOCKS: Final = list(blocks())


def in_language(name: str) -> pytest.MarkDecorator:
    """Parametrize by the blocks of a language."""
    chosen = [block for block in BLOCKS if block.language == name]
    return pytest.mark.parametrize("block", chosen, ids=[block.place for block in chosen])


SHOP: Final = """\
name: shop
source: {dsn: postgresql://cdc@localhost/shop}
tables: [{match: shop.*}]
log: {path: log}
sinks: [{name: lake, type: delta, path: "lake/{schema}/{table}"}]
"""
"""What a page leaves out when it shows a part of a definition."""


def without_other_configurations(part: dict[str, Any]) -> dict[str, Any]:
    """The part of a definition in a block; empty if another program reads the block."""
    return {} if part.keys() & OF_OTHERS else part


def is_before(other: Block, block: Block) -> bool:
    """Whether a block of the same language stands above on the page."""
    return (other.page, other.language) == (block.page, block.language) and other.line < block.line


@in_language("yaml")
def test_a_definition_in_a_page_is_valid(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = YAML(typ="safe")
    part = without_other_configurations(yaml.load(block.text))
    for variable in re.findall(r"\$\{(\w+)\}|env: (\w+)", block.text):
        monkeypatch.setenv("".join(variable), "postgresql://cdc@localhost/shop")
    definition = yaml.load(SHOP)
    for above in [other for other in BLOCKS if is_before(other, block)]:
        definition |= without_other_configurations(yaml.load(above.text))  # a block may need what one above it defines
    excluded = [*definition.get("exclude", ()), *part.get("exclude", ())]
    file = tmp_path / "shop.yaml"
    with file.open("w") as stream:
        yaml.dump(definition | part | {"exclude": excluded}, stream)

    assert [str(issue) for issue in check_definition(file).issues] == []


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Place and text of each command of ours in the blocks and in the text of a page."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        started = re.findall(r"^ *(?:\$ |uv run )(cdc .*)", line)
        for command in [*started, *re.findall(r"`(cdc [^`]+)`", line)]:
            yield f"{page.name}:{number}", command


@cache
def root() -> Any:
    return get_command(application())


def words_of(command: str) -> list[str]:
    """The words of a command up to a comment, a pipe or a file for its output; what is optional is there."""
    command = re.sub(r" \\\| [^\]]*\]", "]", command)  # `[--at TIME \\| --min-position POSITION]`: the first choice
    parser = shlex.shlex(re.sub(r"[\[\]…]", "", command), posix=True, punctuation_chars="|>")
    parser.whitespace_split = True
    return list(takewhile(lambda word: word not in {"|", ">"}, parser))[1:]


def refusal(command: str) -> str | None:
    """Why our command line does not take a command; None if it does, or if the text only names the command."""
    words = [re.sub(r"^[A-Z]+$", "1", word) for word in words_of(command)]
    named_alone = all(word.startswith("-") for word in words[2:])
    verb = root()
    try:
        while words and hasattr(verb, "commands"):
            _, verb, words = verb.resolve_command(verb.context_class(verb), words)
        if words and words != ["--help"]:
            verb.make_context("cdc", words)
    except UsageError as exc:
        return None if named_alone and isinstance(exc, MissingParameter) else exc.format_message()
    return None


WRITTEN: Final = [page for page in PAGES if page.parent.name != "reference"]
"""Pages that nothing generates; those of the reference show how commands are called, not commands."""


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_in_a_page_are_ours_and_take_their_arguments(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = {(place, command): refusal(command) for place, command in commands(page)}
    assert {at: reason for at, reason in refused.items() if reason is not None} == {}


def test_a_command_that_is_not_ours_or_has_other_arguments_is_refused() -> None:
    assert str(refusal("cdc statsu -c shop.yaml")).startswith("No such command 'statsu'")
    assert refusal("cdc status --nothing") == "No such option: --nothing"
    assert refusal("cdc replay lake --tables") == "Option '--tables' requires an argument."
    assert refusal("cdc status -c shop.yaml  # exit status 4") is None


@pytest.fixture(name="server", scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server of its own, because pages change settings of the server; with the shop of the demo."""
    with EmbeddedPostgres(tmp_path_factory.mktemp("pg")) as server:
        make_shop(server.dsn())
        yield server


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.language == "sql"}))
def test_the_sql_of_a_page_runs_in_its_order(page: str, server: EmbeddedPostgres) -> None:
    for block in BLOCKS:
        if (block.page, block.language) == (page, "sql"):
            text = block.text.replace("OWNER", "postgres")
            psql = [str(server.programs / "psql"), "--no-psqlrc", "-v", "ON_ERROR_STOP=1", "-d", server.dsn()]
            ended = subprocess.run(psql, input=text, capture_output=True, text=True, timeout=60, check=False)
            assert ended.returncode == 0, f"{block.place}: {ended.stderr}"
