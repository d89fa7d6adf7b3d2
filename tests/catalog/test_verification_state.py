"""The record of the continuous verification in the catalog."""

from __future__ import annotations

from pathlib import Path

from cdc.catalog import Catalog
from cdc.catalog.verification_state import VERIFICATION, VerificationRecord, VerificationState


def test_a_record_replaces_the_one_before_and_outlives_the_process(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    failing = VerificationRecord(state=VerificationState.FAILING, every=60.0, error={"code": "CDC-2001"})
    with Catalog.open(url) as catalog:
        assert catalog.verification.get("shop") is None
        catalog.verification.put("shop", VerificationRecord(state=VerificationState.OFF))
        catalog.verification.put("shop", failing)
    with Catalog.open(url) as catalog:
        assert catalog.verification.get("shop") == failing
        assert catalog.verification.get("other") is None
        assert len(catalog.commands.ls("shop", VERIFICATION)) == 1
