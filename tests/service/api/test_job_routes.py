"""Backfills, resyncs and replays over the API: what is asked is in the catalog, what cannot be done is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cdc.catalog import Catalog
from cdc.catalog.commands import REPLAY
from cdc.log.writer import LogWriter
from cdc.service.api.app import create_app
from cdc.snapshot.backfill_documents import BACKFILL, BackfillAction, BackfillRequest
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until
from tests.log.rows import IDENTITY, LIMITS, info, row, schema_of, table
from tests.pipelines.shop_pipeline import make_shop
from tests.service.pipeline import NAME, copying, definition
from tests.service.running import answering, client_of

PIPELINE = f"/api/v1/pipelines/{NAME}"
BACKFILLS = f"{PIPELINE}/backfills"
ORDERS = {"tables": ["shop.orders"]}


@pytest.fixture
def client(catalog: Catalog, tmp_path: Path) -> Iterator[httpx.Client]:
    shop = definition(tmp_path, "postgresql://nobody@127.0.0.1:1/nowhere")
    with answering(create_app(catalog, shop, "log")) as url, client_of(url, timeout=60) as opened:
        yield opened


def code(answer: httpx.Response) -> tuple[int, str]:
    assert set(answer.json()) == {"code", "message", "suggestion"}
    return answer.status_code, answer.json()["code"]


def test_what_is_asked_is_a_command_and_stands_in_the_audit(client: httpx.Client, catalog: Catalog) -> None:
    body = {**ORDERS, "first": ["1"], "last": ["9"], "sink": "lake", "rate": 500}
    answer = client.post(BACKFILLS, json=body)
    assert (answer.status_code, answer.json()["state"], answer.json()["kind"]) == (202, "queued", "backfill")
    (command,) = catalog.commands.pending(NAME, BACKFILL)
    assert BackfillRequest.from_json(command.payload) == BackfillRequest(
        ("shop.orders",), first=("1",), last=("9",), sink="lake", rate=500
    )
    (line,) = catalog.audit.ls()
    assert (line.actor, line.action, line.detail) == (
        "api from 127.0.0.1", "backfill", {"id": command.id, "tables": ["shop.orders"]},
    )  # fmt: skip


def test_figures_are_numbers_and_the_same_everywhere(client: httpx.Client, catalog: Catalog) -> None:
    job = copying(
        catalog, "shop.orders", BackfillRequest(("shop.orders",), resync=True),
        state="snapshotting", rows=1_000, estimate=4_000, seconds=2.0,
    )  # fmt: skip
    told = client.get(f"{BACKFILLS}/{job}").json()
    expected = {"rows": 1_000, "estimate": 4_000, "share": 0.25, "rows_per_second": 500.0, "seconds_left": 6.0}
    assert told | expected == told
    assert told["tables"]["shop.orders"] | expected == told["tables"]["shop.orders"]
    assert client.get(BACKFILLS).json() == [told]
    status = client.get("/api/v1/status").json()
    assert status["backfills"] == [told]
    samples = {
        (s.name, s.labels["table"]): s.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for s in family.samples if s.name.startswith("cdc_backfill")
    }  # fmt: skip
    assert samples == {
        ("cdc_backfill_rows_estimated", "shop.orders"): 4_000,
        ("cdc_backfill_share", "shop.orders"): 0.25,
        ("cdc_backfill_eta_seconds", "shop.orders"): 6,
    }


@pytest.mark.parametrize("verb", list(BackfillAction))
def test_a_verb_is_passed_on_while_the_backfill_has_not_ended(
    client: httpx.Client, catalog: Catalog, verb: BackfillAction
) -> None:
    job = copying(catalog, "shop.orders", BackfillRequest(("shop.orders",)))
    assert client.post(f"{BACKFILLS}/{job}/{verb.value}", json={}).status_code == 202
    assert [command.payload for command in catalog.commands.pending(NAME, verb.kind)] == [{"id": job}]
    catalog.commands.finish(job, {"state": "done"})
    assert code(client.post(f"{BACKFILLS}/{job}/{verb.value}", json={})) == (409, "CDC-1006")
    assert len(catalog.commands.ls(NAME, verb.kind)) == 1


@pytest.mark.parametrize("other", [["shop.*"], ["shop.order*"], ["shop.customers", "shop.orders"]])
def test_two_backfills_over_one_table_are_refused_and_disjoint_ranges_are_no_excuse(
    client: httpx.Client, catalog: Catalog, other: list[str]
) -> None:
    assert client.post(BACKFILLS, json={**ORDERS, "last": ["5"]}).status_code == 202
    answer = client.post(BACKFILLS, json={"tables": other, "first": ["6"]})
    assert code(answer) == (409, "CDC-1006")
    assert "shop.orders" in answer.json()["message"]
    assert client.post(BACKFILLS, json={"tables": ["shop.products"]}).status_code == 202
    assert len(catalog.commands.ls(NAME, BACKFILL)) == 2


def test_who_asks_while_another_request_is_being_taken_on_is_told_to_ask_again(
    client: httpx.Client, catalog: Catalog
) -> None:
    assert catalog.leases.acquire(f"asking/{NAME}", "somebody", 60)
    assert code(client.post(BACKFILLS, json=ORDERS)) == (409, "CDC-1006")
    assert catalog.commands.ls(NAME, BACKFILL) == []
    catalog.leases.release(f"asking/{NAME}", "somebody")
    assert client.post(BACKFILLS, json=ORDERS).status_code == 202
    assert catalog.leases.holder(f"asking/{NAME}") is None


def test_of_many_who_ask_at_once_one_is_taken_on(client: httpx.Client, catalog: Catalog) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post(BACKFILLS, json=ORDERS).status_code, range(8)))
    assert sorted(answers) == [202] + [409] * 7
    assert len(catalog.commands.ls(NAME, BACKFILL)) == 1


IMPOSSIBLE: list[tuple[Any, tuple[int, str]]] = [
    ({"tables": ["shop.none"]}, (422, "CDC-1000")),
    ({**ORDERS, "sink": "none"}, (422, "CDC-1000")),
    ({**ORDERS, "first": ["1", "2"]}, (422, "CDC-1000")),
    ({**ORDERS, "where": "id > 5"}, (503, "CDC-2001")),
    ({**ORDERS, "keys": [["1", "2"]]}, (422, "CDC-1000")),
    ({**ORDERS, "keys": []}, (422, "CDC-1000")),
    # whether the column takes it is asked of the source, which is not there
    ({**ORDERS, "keys": [["1"], ["2"]]}, (503, "CDC-2001")),
    ({**ORDERS, "rate": 0}, (422, "CDC-1000")),
    ({**ORDERS, "bogus": 1}, (422, "CDC-1000")),
    ({"tables": []}, (422, "CDC-1000")),
    ({}, (422, "CDC-1000")),
    ([], (422, "CDC-1000")),
]


def test_what_cannot_be_done_is_refused_and_starts_nothing(client: httpx.Client, catalog: Catalog) -> None:
    for body, expected in IMPOSSIBLE:
        assert code(client.post(BACKFILLS, json=body)) == expected, body
    assert catalog.commands.ls(NAME, BACKFILL) == []
    assert catalog.audit.ls() == []


def test_a_range_of_a_table_without_a_key_is_refused_with_the_way_out(
    client: httpx.Client, catalog: Catalog, tmp_path: Path
) -> None:
    writer = LogWriter.open(tmp_path / "log", IDENTITY, LIMITS)
    keyed = schema_of(300, "note")
    bare = replace(keyed, name="lines", columns=tuple(replace(column, key=None) for column in keyed.columns))
    told = row(2, op="s", relation=300, topic=bare.topic, key=None, after=None, payload=bare.to_json())
    writer.commit(writer.stage(table(told)), info(2))
    for body in ({"first": ["1"], "last": ["9"]}, {"keys": [["1"]]}, {"where": "id > 5"}, {}):
        answer = client.post(BACKFILLS, json={"tables": ["shop.lines"], **body})
        assert code(answer) == (422, "CDC-1000"), body
        assert "'shop.lines' has no key" in answer.json()["message"]
        assert "cdc tables resync 'shop.lines'" in answer.json()["suggestion"]
    assert catalog.commands.ls(NAME, BACKFILL) == []


def test_a_predicate_that_does_more_than_say_which_rows_is_refused(
    catalog: Catalog, database: str, tmp_path: Path
) -> None:
    run_sql(database, "CREATE SCHEMA shop", "CREATE TABLE shop.orders (id int PRIMARY KEY)", "CREATE SEQUENCE s")
    app = create_app(catalog, definition(tmp_path, database), "log")
    with answering(app) as url, client_of(url, timeout=60) as client:
        for where in ("setval('s', 7) > 0", "pg_sleep(600) IS NULL", "no_such > 5"):
            assert code(client.post(BACKFILLS, json={**ORDERS, "where": where})) == (422, "CDC-1000"), where
        assert catalog.commands.ls(NAME, BACKFILL) == []
        assert client.post(BACKFILLS, json={**ORDERS, "where": "id > 5"}).status_code == 202


def test_a_body_that_is_no_json_is_told_so(client: httpx.Client) -> None:
    broken = client.post(BACKFILLS, content="{", headers={"content-type": "application/json"})
    assert code(broken) == (400, "CDC-1000")


UNKNOWN = [
    ("GET", f"{BACKFILLS}/99"),
    ("POST", f"{BACKFILLS}/99/pause"),
    ("POST", "/api/v1/pipelines/none/backfills"),
    ("POST", f"{PIPELINE}/tables/shop.none/resync"),
    ("POST", f"{PIPELINE}/tables/shop.*/resync"),
    ("POST", f"{PIPELINE}/sinks/none/replay"),
    ("GET", f"{PIPELINE}/sinks/lake/replay"),
]


def test_what_nobody_knows_is_not_found(client: httpx.Client) -> None:
    for method, path in UNKNOWN:
        body = None if method == "GET" else ORDERS if path.endswith("backfills") else {}
        assert code(client.request(method, path, json=body)) == (404, "CDC-5010"), path


def test_a_command_of_another_kind_or_pipeline_is_no_backfill(client: httpx.Client, catalog: Catalog) -> None:
    others = [
        catalog.commands.post(NAME, "cut", {}),
        catalog.commands.post("other", BACKFILL, BackfillRequest(("t",)).to_json()),
    ]
    for number in others:
        assert client.get(f"{BACKFILLS}/{number}").status_code == 404
        assert client.post(f"{BACKFILLS}/{number}/cancel", json={}).status_code == 404


def test_a_resync_is_of_the_one_table_whatever_its_name(client: httpx.Client, catalog: Catalog) -> None:
    answer = client.post(f"{PIPELINE}/tables/shop.orders/resync", json={"rate": 100})
    assert (answer.status_code, answer.json()["kind"]) == (202, "resync")
    (command,) = catalog.commands.pending(NAME, BACKFILL)
    assert BackfillRequest.from_json(command.payload) == BackfillRequest(("shop.orders",), rate=100, resync=True)
    assert [line.action for line in catalog.audit.ls()] == ["tables resync"]


def test_the_description_names_every_path_with_its_models_and_refusals(client: httpx.Client) -> None:
    described = client.get("/api/v1/openapi.json").json()
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            if "/backfills" in path or "/replay" in path or "/resync" in path:
                good = operation["responses"]["202" if method == "post" else "200"]
                assert good["content"]["application/json"]["schema"], path
                assert {"400", "401", "403", "404", "409", "422", "503"} <= set(operation["responses"])
                assert operation["security"] == [{"HTTPBearer": []}]
                assert method == "get" or operation["requestBody"]["required"]
    assert described["components"]["schemas"]["BackfillBody"]["properties"]["where"]["description"]
    assert {"share", "rows_per_second", "seconds_left"} <= set(
        described["components"]["schemas"]["BackfillStatus"]["properties"]
    )


def test_a_replay_runs_in_a_child_and_leaves_its_report(tmp_path: Path) -> None:
    ground = make_shop(tmp_path)
    app_of = (ground.definition, str(tmp_path / "log"))
    with Catalog.open(ground.definition.catalog.url) as catalog:
        app = create_app(catalog, *app_of, file=tmp_path / "shop.yaml")
        with answering(app) as url, client_of(url, timeout=60) as client:
            path = f"{PIPELINE}/sinks/lake/replay"
            asked = client.post(path, json={"dry_run": True})
            assert (asked.status_code, asked.json()["state"]) == (202, "running")
            done = until(lambda: (s := client.get(path).json())["finished_at"] and s, "the replay to end")
            assert (done["state"], done["error"]) == ("done", None)
            assert {table["topic"] for table in done["result"]["tables"]} == {"shop.orders", "shop.items"}
            client.post(path, json={"tables": ["shop.none"]})
            wrong = until(lambda: (s := client.get(path).json())["finished_at"] and s, "the replay to end")
            assert (wrong["state"], wrong["error"]["code"]) == ("failed", "CDC-1000")
        assert [line.action for line in catalog.audit.ls()] == [REPLAY, REPLAY]


def test_one_replay_runs_at_a_time_and_what_a_dead_server_left_is_said_to_have_failed(
    catalog: Catalog, tmp_path: Path
) -> None:
    path = f"{PIPELINE}/sinks/lake/replay"
    left = {"sink": "lake", "start": "beginning", "end": "latest", "tables": [], "dry_run": False}
    catalog.commands.post(NAME, REPLAY, left)
    app = create_app(catalog, definition(tmp_path), "log", file=tmp_path / "none.yaml")
    with answering(app) as url, client_of(url) as client:
        ended = client.get(path).json()
        assert (ended["state"], ended["error"]["code"]) == ("failed", "CDC-5002")
        catalog.commands.post(NAME, REPLAY, left)
        assert code(client.post(path, json={})) == (409, "CDC-1006")
        assert client.get(path).json()["state"] == "running"


def test_a_server_without_its_file_says_which_command_does_it(client: httpx.Client) -> None:
    answer = client.post(f"{PIPELINE}/sinks/lake/replay", json={})
    assert code(answer) == (409, "CDC-1006")
    assert answer.json()["suggestion"] == "run: cdc replay -c FILE --from=beginning --to=latest -- lake"
