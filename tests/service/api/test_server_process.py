"""The server process: its port, and addresses that need a token."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cdc.errors import PortTaken, ServiceUnprotected
from cdc.service.api.server_process import bind, main
from tests.service.pipeline import definition


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "db.internal"])
def test_a_service_that_other_machines_reach_does_not_start_without_a_token(tmp_path: Path, host: str) -> None:
    with pytest.raises(ServiceUnprotected, match=re.escape(repr(host))) as refused:
        main(definition(tmp_path, host=host), tmp_path / "shop.yaml")
    assert "service: {token: {file: " in refused.value.fix
    assert not (tmp_path / "catalog.db").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_local_service_needs_no_token_and_one_with_a_token_may_be_anywhere(tmp_path: Path, host: str) -> None:
    assert definition(tmp_path, host=host).service.exposure is None
    assert definition(tmp_path, host="0.0.0.0", token={"env": "SHOP_TOKEN"}).service.exposure is None


def test_a_taken_port_is_replaced_by_the_next_free_one_unless_it_must_be_that_port() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            assert second.getsockname()[1] > port
        with pytest.raises(PortTaken, match=f"from {port} to {port}"):
            bind("127.0.0.1", port, neighbours=0)
