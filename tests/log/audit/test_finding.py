"""Findings: which are harmless, and how one is printed."""

from __future__ import annotations

import pytest

from cdc.log.audit.finding import HARMLESS, AuditFinding, DamageKind
from cdc.position import Position


@pytest.mark.parametrize("kind", DamageKind)
def test_only_orphan_files_recorded_losses_and_missing_checksums_are_harmless(kind: DamageKind) -> None:
    finding = AuditFinding(damage=kind, message="something")
    assert finding.is_harmless == (kind.value in {"foreign", "lost", "unchecked"}) == (kind in HARMLESS)
    assert finding.to_json()["harmless"] == finding.is_harmless


def test_a_line_names_file_message_positions_and_tables() -> None:
    finding = AuditFinding(
        damage=DamageKind.SIZE,
        message="the file is too short",
        file="changes/a.parquet",
        first=Position(16),
        last=Position(32),
        tables=("shop.items", "shop.orders"),
    )
    expected = "changes/a.parquet: the file is too short; positions 0/10 to 0/20; tables shop.items, shop.orders"
    assert finding.line == expected
    assert AuditFinding(damage=DamageKind.MISFIT, message="they differ").line == "they differ"
    assert finding.to_json()["first"] == "0/10"
