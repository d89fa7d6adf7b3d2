"""`cdc deliveries`: what is shown, paused, resumed and rewound."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.catalog.delivery_requests import DELIVERY_PAUSES, REWIND_DELIVERY
from tests.cli.command import run
from tests.config.definitions import SOUND
from tests.delivery.sent_log import begin_log
from tests.fixtures.catalog import put_catalog


@pytest.fixture
def definition(tmp_path: Path) -> Path:
    """A definition with a log and one delivery."""
    put_catalog(tmp_path)
    begin_log(tmp_path / "log")
    path = tmp_path / "shop.yaml"
    catalog = f"catalog: {{url: 'sqlite:///{tmp_path}/catalog.db'}}\n"
    path.write_text(f"{SOUND}{catalog}deliveries: [{{name: events, type: file, path: out}}]\n")
    return path


def test_deliveries_are_listed_and_shown(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    (listed,) = run(capsys, "deliveries", "ls", "-c", definition, "--json").envelope["result"]["deliveries"]
    shown = run(capsys, "deliveries", "show", "events", "-c", definition, "--json").envelope["result"]

    assert (listed["promise"], listed["state"]) == ("exactly once", "not started")
    assert shown == {**listed, "dead_letters": []}
    assert "events  file  exactly once" in run(capsys, "deliveries", "ls", "-c", definition).output


def test_a_delivery_is_paused_and_resumed(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    paused = run(capsys, "deliveries", "pause", "events", "-c", definition)
    again = run(capsys, "deliveries", "pause", "events", "-c", definition)
    with Catalog.open(f"sqlite:///{definition.parent}/catalog.db") as catalog:
        assert DELIVERY_PAUSES.paused(catalog, "shop") == {"events"}
    resumed = run(capsys, "deliveries", "resume", "events", "-c", definition)

    assert "delivery 'events' is paused\n" in paused.output
    assert "is paused already" in again.output
    assert "delivery 'events' is running\n" in resumed.output


@pytest.mark.parametrize(("to", "position"), [("earliest", "0/0"), ("latest", "0/A"), ("0/8", "0/8")])
def test_a_rewind_to_exactly_a_position_waits_for_the_process(
    capsys: pytest.CaptureFixture[str], definition: Path, to: str, position: str
) -> None:
    done = run(capsys, "deliveries", "rewind", "events", "--to", to, "--yes", "-c", definition, "--json")

    assert done.envelope["result"] == {"position": position, "done": False}
    with Catalog.open(f"sqlite:///{definition.parent}/catalog.db") as catalog:
        (command,) = catalog.commands.pending("shop", REWIND_DELIVERY)
    assert command.payload == {"delivery": "events", "position": position}


def test_an_unknown_delivery_is_refused(capsys: pytest.CaptureFixture[str], definition: Path) -> None:
    for command in (["deliveries", "show", "other"], ["deliver", "other"]):
        done = run(capsys, *command, "-c", definition)
        assert (done.status, "CDC-5010" in done.errors) == (2, True)
