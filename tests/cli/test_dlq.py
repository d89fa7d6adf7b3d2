"""cdc dlq: rows that are parked beside a sink of any kind, shown without the process that parked them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cdc.catalog import Catalog
from cdc.config.delta_sink import HistoryMode
from cdc.targets.dead_letter_rows import ParkedRow
from pipelines.dead_letters.requests import to_dead_letter
from tests.cli.command import run
from tests.contracts.folded import part, put
from tests.pipelines.dead_letters import parking_history
from tests.pipelines.dead_letters.sink_driver import NAN, SearchDriver


def shown(folder: Path, capsys: pytest.CaptureFixture[str], sink: str, rows: Iterable[ParkedRow]) -> dict[str, Any]:
    """What `cdc dlq show` tells of the one row that a sink has parked."""
    definition, catalog = folder / "shop.yaml", f"sqlite:///{folder}/catalog.db"
    definition.write_text(
        "version: 1\nname: shop\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/no'}\ntables: [{match: '*.*'}]\n"
        f"log: {{path: '{folder}/log'}}\ncatalog: {{url: '{catalog}'}}\nsinks: [{{name: it, {sink}}}]\n"
    )
    (letter,) = (to_dead_letter("it", row) for row in rows)
    with Catalog.open(catalog) as opened:
        opened.dead_letters.mirror("shop", "it", [letter])
    capsys.readouterr()  # what was logged of parking it
    found: dict[str, Any] = run(capsys, "dlq", "show", letter.id, "-c", definition, "--json").envelope["result"]
    return found


def test_a_row_beside_a_search_index_is_shown_as_far_as_it_was_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = SearchDriver(tmp_path)
    driver.take(put(1, "a", 10), part(9, 11, {3: "9.00"}), upto=20)
    found = shown(tmp_path, capsys, f"type: search, path: '{driver.path}'", driver.quarantine.rows)
    driver.sink.close()

    assert (found["table"], found["key"], found["code"], found["position"]) == ("shop.orders", ["9"], "CDC-3002", "0/B")
    assert (found["row"], found["complete"], found["changes"]) == ({"id": "9", "price": "9.00"}, False, 0)


def test_of_a_history_the_refused_change_is_shown_and_how_many_wait_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = parking_history.open_parking_sink(tmp_path / "lake", HistoryMode.VERSIONS)
    lake.take(
        [
            parking_history.complete_row(5, 1, "1.00", "c"),
            parking_history.complete_row(6, 1, NAN),
            parking_history.partial_row(7, 1, "2.00"),
        ],
        10,
    )
    path = f"{tmp_path}/lake/{{schema}}/{{table}}"
    found = shown(tmp_path, capsys, f"type: delta, stored_as_scd_type: 2, path: '{path}'", lake.quarantine.rows)

    assert (found["key"], found["code"], found["position"], found["changes"]) == (["1"], "CDC-3001", "0/6", 3)
    assert found["row"] == {"id": "1", "plain": NAN, "large": "l6", "huge": "h"}
