"""A delivery that is put together from its definition sends, and closes its destination."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdc import metrics
from cdc.config import load_definition
from cdc.delivery.delivery_figures import DeliveryFigures
from cdc.delivery.destinations.file import PROGRESS
from cdc.delivery.opened_delivery import opened_delivery
from cdc.delivery.progress import delivery_uuid
from cdc.errors import DeliveryFenced
from cdc.log.reader import LogReader
from tests.config.definitions import SOUND, write
from tests.delivery.loop_run import drain
from tests.delivery.sent_log import begin_log, change
from tests.log.sample_log import ORDERS, commit_rows


@pytest.mark.parametrize("encoding", ["cdc", "debezium", "flat", "cloudevents"])
def test_a_delivery_sends_in_each_format(tmp_path: Path, encoding: str):
    commit_rows(begin_log(tmp_path / "log"), change(ORDERS, 20, 0, "1"))
    text = f"{SOUND}deliveries: [{{name: copy, type: file, path: out, format: {encoding}}}]\n"
    definition = load_definition(write(tmp_path, text))
    settings, log = definition.deliveries[0], LogReader(tmp_path / "log")
    figures = DeliveryFigures("shop", "copy", metrics.Metrics())

    with opened_delivery(definition, settings, log, figures) as opened:
        drain(opened.loop)
        with pytest.raises(DeliveryFenced), opened_delivery(definition, settings, log, figures):
            pass
    with opened_delivery(definition, settings, log, figures) as again:
        assert again.loop.stored.position == 20

    assert opened.registration.uuid == delivery_uuid(log.log_id, "copy")
    assert (tmp_path / "out" / PROGRESS).exists()
    (line,) = (tmp_path / "out" / "copy-000001.jsonl").read_text().splitlines()
    assert json.loads(line)["topic"] == "shop.shop.orders"


_VIEWS = """\
exclude: [shop.orders]
views: [{name: shop.orders, key: [id], sql: SELECT id FROM shop.items}]
deliveries: [{name: copy, type: file, path: out, views: [shop.orders]}]
"""


def test_a_delivery_of_views_sends_the_changes_of_the_log_of_views(tmp_path: Path) -> None:
    begin_log(tmp_path / "log")
    commit_rows(begin_log(tmp_path / "log/derived"), change(ORDERS, 20, 0, "1"))
    definition = load_definition(write(tmp_path, SOUND + _VIEWS))
    settings = definition.deliveries[0]
    log = LogReader(definition.log_of(settings))
    figures = DeliveryFigures("shop", "copy", metrics.Metrics())

    with opened_delivery(definition, settings, log, figures) as opened:
        drain(opened.loop)
        opened.registration.report(opened.loop.stored.position)
    (line,) = (tmp_path / "out" / "copy-000001.jsonl").read_text().splitlines()
    assert json.loads(line)["topic"] == "shop.shop.orders"
    assert len(list((tmp_path / "log/derived/_consumers").iterdir())) == 1
