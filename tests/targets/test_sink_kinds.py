"""Kinds of sinks for readers: each kind that a definition can have is read in its own way."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config import DeltaSinkDefinition, SearchSinkDefinition
from cdc.config.sinks import DefinedSink
from cdc.targets.delta_reading import DeltaReading
from cdc.targets.search_reading import SearchReading
from cdc.targets.search_server.reading import SearchServerReading
from cdc.targets.sink_kinds import READINGS, reading_of

SERVER = {"engine": "opensearch", "server": {"url": "http://127.0.0.1:9200"}}
SINKS: list[tuple[DefinedSink, type]] = [
    (DeltaSinkDefinition.model_validate({"type": "delta", "name": "lake", "path": "/lake/{table}"}), DeltaReading),
    (SearchSinkDefinition.model_validate({"type": "search", "name": "find", "path": "/find"}), SearchReading),
    (SearchSinkDefinition.model_validate({"type": "search", "name": "far", **SERVER}), SearchServerReading),
]


@pytest.mark.parametrize(("sink", "reading"), SINKS)
def test_a_sink_is_read_by_the_reading_of_its_kind(sink: DefinedSink, reading: type) -> None:
    assert type(reading_of(sink)) is reading


def test_every_kind_has_a_sink_in_this_test() -> None:
    assert {sink.kind for sink, _ in SINKS} == READINGS.keys()


def test_a_sink_that_has_written_nothing_is_not_begun(tmp_path: Path) -> None:
    lake = DeltaSinkDefinition.model_validate({"type": "delta", "name": "lake", "path": f"{tmp_path}/lake/{{table}}"})
    find = SearchSinkDefinition.model_validate({"type": "search", "name": "find", "path": f"{tmp_path}/find"})

    assert not reading_of(lake).is_begun(lake)
    assert not reading_of(find).is_begun(find)
    assert (reading_of(lake).published(lake), reading_of(find).published(find)) == (None, None)
