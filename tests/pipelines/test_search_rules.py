"""Rules of a search sink of a running pipeline: what they hide is in no file, message or output of the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from cdc.catalog import Catalog
from cdc.errors import SinkUnavailable
from cdc.targets.published_record import TableRecord
from cdc.targets.search_index_reader import SearchIndex
from pipelines.__main__ import main
from tests.cli.command import run
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until
from tests.pipelines.apply_thread import run_verify
from tests.pipelines.sinks.search.test_rule_changes import CANARY, files_with
from tests.pipelines.test_dead_letters import Lane, captured
from tests.snapshot.reader_with_backfills import Running

TABLE: Final = (
    (
        "CREATE TABLE people (id int, open bool, name text, mail text, phone text, ssn text, diary text, large text,"
        " PRIMARY KEY (id, open))"
    ),
    "ALTER TABLE people ALTER large SET STORAGE EXTERNAL, ALTER diary SET STORAGE EXTERNAL",
    (
        f"INSERT INTO people SELECT i, i % 2 = 0, 'name' || i, '{CANARY} m' || i, '{CANARY} p' || i, '{CANARY} s' || i,"
        f" repeat('{CANARY} ', 300), repeat('{CANARY} ', 300) FROM generate_series(1, 10) i"
    ),
    "CREATE PUBLICATION cdc_held_pub FOR TABLE people WHERE (open)",
)
RULE: Final = (
    "{match: public.people, except_column_list: [ssn], fields: [name, mail, large, phone],"
    " transform: {drop: [phone], mask: {mail: 'keep_last:2', large: redact}, rename: {name: called}}}"
)


class People:
    """A captured table of people with a search sink, and everything that the pipeline shows of it."""

    def __init__(self, held: Captured, capsys: pytest.CaptureFixture[str]) -> None:
        self.held, self.capsys, self._output = held, capsys, ""

    def cdc(self, *arguments: object) -> Any:
        """What a command prints as JSON."""
        self.output()
        outcome = run(self.capsys, *arguments, "-c", self.held.path, "--json")
        self._output += outcome.output + outcome.errors
        return outcome

    def output(self) -> str:
        """Everything that commands, log messages and replays have printed."""
        printed = self.capsys.readouterr()
        self._output += printed.out + printed.err
        return self._output

    def under(self, rule: str) -> None:
        """Change the rules of the sink."""
        text = self.held.path.read_text().partition("sinks:")[0]
        find = f"{{name: find, type: search, path: '{self.held.folder}/find', rules: [{rule}]}}"
        self.held.path.write_text(f"{text}sinks: [{find}]\n")

    def record(self) -> TableRecord | None:
        with suppress(SinkUnavailable):
            published = SearchIndex.open(self.held.folder / "find").published
            return None if published is None else next(iter(published.tables.values()), None)
        return None

    def parked(self) -> tuple[tuple[str, ...], ...]:
        found = self.record()
        return () if found is None else found.parked

    def documents(self) -> dict[str, dict[str, str | None]]:
        index = SearchIndex.open(self.held.folder / "find")
        return {str(row.key[0]): dict(row.source) for row in index.documents("public.people")}

    def apply(self, is_done: Callable[[], object]) -> None:
        """Apply until the condition holds."""
        with Lane(self.held):
            until(is_done, "the sink")

    def leaks(self) -> list[str]:
        """Where the canary is, the log and its copy of the source apart."""
        shown = ["output"] if CANARY in self.output() else []
        return files_with(self.held.folder / "find", CANARY) + files_with(self.held.folder / "catalog", CANARY) + shown


@pytest.fixture(name="people")
def _people(tmp_path: Path, database: str, capsys: pytest.CaptureFixture[str]) -> People:
    sink = f"{{name: find, type: search, path: '{tmp_path}/find', rules: [{RULE}]}}"
    return People(captured(tmp_path, database, *TABLE, sink=sink), capsys)


def test_what_a_rule_hides_is_shown_nowhere_from_the_copy_to_a_retry_and_a_replay(people: People) -> None:
    people.held.stream()
    people.apply(lambda: (found := people.record()) and found.state == "streaming")
    masked = f"{'*' * 13}m4"
    four = {"id": "4", "open": "t", "called": "name4", "mail": masked, "large": "***"}
    assert people.documents()["4"] == four
    run_sql(
        people.held.dsn,
        "UPDATE people SET name = 'partial' WHERE id = 4",  # does not send the large values
        f"UPDATE people SET mail = '{CANARY} m9' WHERE id = 6",
        "UPDATE people SET open = true WHERE id = 7",  # a row of which the index has nothing
    )
    people.held.stream()
    with Catalog.open(people.held.definition.catalog.url) as catalog:
        people.apply(lambda: people.parked() and catalog.dead_letters.ls("held"))
    (letter,) = people.cdc("dlq", "ls").envelope["result"]["letters"]
    shown = people.cdc("dlq", "show", letter["id"]).envelope["result"]
    assert shown["row"] == {"id": "7", "open": "t", "name": "name7", "mail": f"{'*' * 13}m7"}
    assert people.documents()["4"] == {**four, "called": "partial"}
    found = people.cdc("search", "people", "called:partial").envelope["result"]["rows"]
    assert [row["row"] for row in found] == [{**four, "id": 4, "open": True, "called": "partial"}]
    assert people.cdc("search", "people", CANARY).envelope["result"]["rows"] == []
    assert people.leaks() == []

    with Running(people.held) as running, Lane(people.held):
        running.until(lambda: "7" in people.documents() and not people.parked(), "the row")
    assert people.documents()["7"] == {**four, "id": "7", "called": "name7", "mail": f"{'*' * 13}m7"}
    assert run_verify(people.held, people.capsys, "--against", "log")[0] == 0
    before = people.documents()
    assert main(["replay", "find", "-c", str(people.held.path)]) == 0
    assert (people.documents(), people.leaks()) == (before, [])


def test_a_rule_that_comes_later_is_followed_and_one_that_goes_needs_a_replay(people: People) -> None:
    people.under("")
    people.held.stream()
    people.apply(lambda: (found := people.record()) and found.state == "streaming")
    assert people.leaks()
    people.under(RULE)
    refused = people.cdc("search", "people", "name4")
    assert (refused.status, "CDC-3019" in refused.output, CANARY in people.output()) == (1, True, False)
    doctor = people.cdc("doctor").envelope["result"]["problems"]
    assert [one["fatal"] for one in doctor if one["code"] == "CDC-3019"] == [False]

    people.apply(lambda: "called" in people.documents()["4"])
    assert people.leaks() == []
    assert [row["row"]["id"] for row in people.cdc("search", "people", "name4").envelope["result"]["rows"]] == [4]
    assert run_verify(people.held, people.capsys, "--against", "log")[0] == 0

    people.under("")
    people.apply(lambda: (found := people.record()) and found.state == "failed")
    assert people.leaks() == []
    assert people.cdc("search", "people", "name4").status == 1
    assert main(["replay", "find", "-c", str(people.held.path)]) == 0
    assert people.documents()["4"]["mail"] == f"{CANARY} m4"
    people.under(RULE)
    assert main(["replay", "find", "-c", str(people.held.path)]) == 0
    assert people.leaks() == []
