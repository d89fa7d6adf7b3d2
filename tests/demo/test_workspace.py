"""The demo uses only its own folder and a free port."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cdc.config import DeltaSinkDefinition, load_definition
from cdc.config.delta_sink import HistoryMode
from cdc.demo.workspace import FOLDER, Workspace, free_port, open_workspace


def test_the_demo_removes_its_state_at_the_end(folder: Path) -> None:
    with open_workspace(folder, keep=False) as place:
        place.log.mkdir()
        assert place.state == folder / FOLDER

    assert list(folder.iterdir()) == []


def test_the_state_stays_when_kept_and_is_never_taken_over(folder: Path) -> None:
    with open_workspace(folder, keep=True) as first:
        pass
    with open_workspace(folder, keep=False) as second:
        assert second.state != first.state

    assert [p.name for p in folder.iterdir()] == [FOLDER]


def test_the_demo_removes_its_state_when_it_fails(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_workspace(folder, keep=False):
        raise KeyboardInterrupt

    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_replaced_by_a_temporary_one(tmp_path: Path) -> None:
    nothing_goes_in = tmp_path / "file"
    nothing_goes_in.touch()
    with open_workspace(nothing_goes_in, keep=False) as place:
        assert tmp_path not in place.state.parents

    assert not place.state.exists()


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        assert free_port(port) > port


def test_the_definition_is_valid_and_stays_inside_the_state(folder: Path) -> None:
    place = Workspace(folder)
    place.define("postgresql://postgres@127.0.0.1:54329/shop", 8083, ["/opt/delta.jar"])
    definition = load_definition(place.definition)

    assert definition.name == "shop"
    assert {sink.name for sink in definition.sinks} == {"lake", "find"}
    assert definition.spark.delta_jars == ("/opt/delta.jar",)
    assert definition.log.path == str(place.log)
    assert definition.catalog.url == place.catalog_url


def test_the_sink_that_is_added_keeps_versions_of_one_table_and_changes_nothing_else(folder: Path) -> None:
    place = Workspace(folder)
    place.define("postgresql://postgres@127.0.0.1:54329/shop", 8083, ())
    before = load_definition(place.definition)
    place.add_history()
    definition = load_definition(place.definition)
    added = definition.sinks[-1]

    assert definition.model_copy(update={"sinks": before.sinks}) == before
    assert definition.sinks[:-1] == before.sinks
    assert isinstance(added, DeltaSinkDefinition)
    assert (added.name, added.tables, added.history_mode) == ("history", ("shop.products",), HistoryMode.VERSIONS)
    assert added.path.startswith(str(place.state))


def test_views_have_sinks_of_their_own(folder: Path) -> None:
    place = Workspace(folder)
    place.define("postgresql://postgres@127.0.0.1:54329/shop", 8083, [], with_views=True)
    definition = load_definition(place.definition)

    assert [view.name for view in definition.views] == ["shop.order_documents", "shop.revenue"]
    assert [sink.name for sink in definition.sinks if sink.views] == ["documents", "marts"]
    assert definition.sink_of_view_inputs is not None
    assert definition.sink_of_view_inputs.name == "lake"
