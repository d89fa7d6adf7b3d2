"""An opened delivery: connected, registered under an id of its own, and closed after the block."""

from __future__ import annotations

from pathlib import Path

from cdc import metrics
from cdc.config import load_definition
from cdc.delivery.delivery_figures import DeliveryFigures
from cdc.delivery.opened_delivery import opened_delivery
from cdc.delivery.progress import delivery_uuid
from cdc.log.reader import LogReader
from tests.config.definitions import SOUND, write
from tests.delivery.sent_log import begin_log

FILE = "deliveries: [{name: events, type: file, path: out}]\n"


def test_a_delivery_can_be_opened_again_after_it_was_closed(tmp_path: Path) -> None:
    begin_log(tmp_path / "log")
    definition = load_definition(write(tmp_path, SOUND + FILE))
    log = LogReader(definition.log.root)
    for _ in range(2):
        figures = DeliveryFigures(definition.name, "events", metrics.Metrics())
        with opened_delivery(definition, definition.deliveries[0], log, figures) as opened:
            assert opened.loop.progress.log_id == log.log_id
            assert opened.registration.uuid == delivery_uuid(log.log_id, "events")
