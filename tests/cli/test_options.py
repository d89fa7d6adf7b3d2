"""What commands share: the confirmation before something is removed, and its audit entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.cli.options import audit, confirm
from cdc.config import load_definition
from cdc.errors import ConfigError
from tests.config.definitions import SOUND, write


def test_without_a_terminal_a_confirmation_needs_yes() -> None:
    confirm("drop it", yes=True)
    with pytest.raises(ConfigError, match="cannot ask for confirmation without a terminal: drop it") as error:
        confirm("drop it", yes=False)
    assert error.value.fix == "add --yes"


def test_a_removal_is_written_to_the_audit(tmp_path: Path) -> None:
    definition = load_definition(write(tmp_path))
    audit(definition, "slots.drop", "cdc_shop", {"lsn": "0/1"}, json=False)
    with Catalog.open(definition.catalog.url) as catalog:
        assert [(entry.action, entry.subject) for entry in catalog.audit.ls()] == [("slots.drop", "cdc_shop")]


def test_an_unreachable_catalog_is_only_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "catalog.db").mkdir()
    definition = load_definition(write(tmp_path, SOUND))
    audit(definition, "slots.drop", "cdc_shop", {}, json=True)
    assert capsys.readouterr().out == ""
    audit(definition, "slots.drop", "cdc_shop", {}, json=False)
    assert "cannot record this command in the audit log: catalog" in capsys.readouterr().out
