"""The demo's search cluster: access without printing the password, and removal of the demo's indexes alone."""

from __future__ import annotations

import json
from contextlib import chdir, suppress
from io import StringIO
from pathlib import Path

import httpx
import pytest

from cdc.config import SearchSinkDefinition, load_definition
from cdc.demo.search_cluster import PASSWORD_FILE, PASSWORD_VARIABLE, SearchCluster, search_cluster
from cdc.demo.terminal import Terminal
from cdc.demo.workspace import Workspace
from cdc.errors import InvalidDefinition, SearchServerDenied
from tests.contracts.folded import batch, put
from tests.fixtures import forked
from tests.fixtures.http_relay import Answer, DropRequest, HttpRelay
from tests.pipelines.sinks.search_server.server_sink import merge, opened

SECONDS = 40
"""Of workload: a cold JVM on a busy machine has the first rows of every sink by then."""


def indexes(server: str, prefix: str) -> list[str]:
    """Return the names of all indexes that begin with a prefix."""
    answer = httpx.get(f"{server}/{prefix}*", params={"expand_wildcards": "all"}, timeout=30)
    return sorted(answer.raise_for_status().json())


@pytest.mark.parametrize(
    ("url", "environment"),
    [("https://cdc:can%40ry@search:9200/", {}), ("https://cdc@search:9200", {PASSWORD_VARIABLE: "can@ry"})],
    ids=["in the URL", "in the environment"],
)
def test_the_password_is_a_reference_in_the_definition_and_is_not_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, url: str, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cluster, place = SearchCluster.of(url, environment), Workspace(folder)
    place.define("postgresql://postgres@127.0.0.1:54329/shop", 8083, (), cluster.keys(folder))
    find = load_definition(place.definition).sinks[1]

    assert isinstance(find, SearchSinkDefinition)
    assert find.access.password is not None
    assert (find.access.url, find.access.user) == ("https://search:9200", "cdc")
    assert find.access.password.reveal() == "can@ry"
    assert find.access.index == f"{cluster.prefix}{{schema}}.{{table}}"
    shown = place.definition.read_text() + cluster.shown + repr(cluster)
    assert ("can@ry" in shown, "can%40ry" in shown) == (False, False)
    if not environment:
        assert (folder / PASSWORD_FILE).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://cdc@search:9200", "without a password"),
        ("http://cdc:canary@search:9200", "unencrypted"),
        ("search:9200", "not usable"),
        ("https://cdc:canary@[search:9200", "not valid"),
    ],
)
def test_a_url_that_no_definition_could_contain_is_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidDefinition, match=message) as refused:
        SearchCluster.of(url, {})

    assert "canary" not in refused.value.message + refused.value.fix


@pytest.mark.parametrize("keep", [False, True])
def test_the_indexes_of_the_demo_are_removed_and_no_others(opensearch, keep: bool) -> None:
    other = f"{opensearch.prefix}other"
    httpx.put(f"{opensearch.url}/{other}", timeout=30).raise_for_status()
    cluster, screen = SearchCluster.of(opensearch.url, {}), StringIO()
    with suppress(KeyboardInterrupt), search_cluster(cluster, Terminal(screen), keep=keep):
        merge(opened(cluster.sink()), batch([put(1, "mug", 10)], 0, 20))
        assert len(indexes(opensearch.url, cluster.prefix)) == 2
        raise KeyboardInterrupt
    left = indexes(opensearch.url, cluster.prefix)
    cluster.remove()

    assert len(left) == (2 if keep else 0)
    assert indexes(opensearch.url, opensearch.prefix) == [other]
    assert cluster.shown in screen.getvalue()


def test_a_cluster_that_refuses_the_login_ends_the_demo_before_it_begins(opensearch_relay: HttpRelay) -> None:
    opensearch_relay.fault(r"^GET / ?$", Answer(401))
    cluster, entered = SearchCluster.of(opensearch_relay.url, {}), False
    with pytest.raises(SearchServerDenied), search_cluster(cluster, Terminal(StringIO()), keep=False):
        entered = True

    assert not entered


def test_indexes_that_cannot_be_removed_are_named_with_the_command(opensearch_relay: HttpRelay) -> None:
    cluster, screen = SearchCluster.of(opensearch_relay.url, {}), StringIO()
    with search_cluster(cluster, Terminal(screen), keep=False):
        opensearch_relay.fault(r"expand_wildcards", DropRequest(), times=None)

    assert f"curl -X DELETE '{opensearch_relay.url}/{cluster.prefix}*'" in screen.getvalue()


@pytest.mark.slow
def test_the_whole_demo_fills_a_cluster_and_leaves_nothing_there(folder: Path, opensearch) -> None:
    with_password = opensearch.url.replace("http://", "http://cdc:canary@")
    with chdir(folder):
        ended = forked.run(
            "cdc", "demo", "--seconds", SECONDS, "--rate", 60, "--json", "--opensearch", with_password, timeout=600
        )
    assert ended.status == 0, ended.errors
    result = json.loads(ended.output.strip().splitlines()[-1])["result"]
    assert [step["name"] for step in result["tour"]] == ["cut", "column", "backfill", "replay"]
    assert all(table["equal"] for table in result["tables"])
    assert result["freshness"]["search_p50_ms"] is not None
    assert result["search"].startswith(f"opensearch {opensearch.url}/cdc-demo-")
    assert "canary" not in ended.output + ended.errors
    prefix = result["search"].rpartition("/")[2].removesuffix("*")
    assert indexes(opensearch.url, prefix) == []
