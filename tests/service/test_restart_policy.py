"""Restart policy: the pauses before a restart, and the signs that end them early."""

from __future__ import annotations

import time
from pathlib import Path

from cdc.catalog import Catalog
from cdc.errors import ExitCode
from cdc.service.restart_policy import RestartPolicy, RestartTriggers
from tests.fixtures.waiting import until


def test_waits_grow_up_to_the_limit_and_are_never_hot_for_the_surroundings() -> None:
    policy = RestartPolicy(jitter=0.0)
    assert [policy.wait(falls, 1) for falls in (1, 2, 3, 4, 10)] == [0.5, 1.0, 2.0, 4.0, 30.0]
    assert policy.wait(1, ExitCode.ENVIRONMENT) == 5.0


def test_the_digest_of_a_definition_changes_with_its_text(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    triggers = RestartTriggers(file, f"sqlite:///{tmp_path}/catalog.db")
    assert triggers.definition_digest() == ""
    file.write_text("name: shop")
    first = triggers.definition_digest()
    file.write_text("name: shop  # repaired")
    assert first != triggers.definition_digest() != ""


def test_the_last_change_is_the_time_of_the_newest_audit_entry(tmp_path: Path) -> None:
    url, before = f"sqlite:///{tmp_path}/catalog.db", time.time()
    triggers = RestartTriggers(tmp_path / "shop.yaml", url)
    with Catalog.open(url) as catalog:
        catalog.audit.write("operator", "slots.recover", "shop")
        changed = until(triggers.last_change, "the audit to be read")
    assert before - 1 <= changed <= time.time()
