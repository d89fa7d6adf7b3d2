"""Problems from the reasons that processes report."""

from __future__ import annotations

import pytest

from cdc.errors import SchemaNotApplicable
from cdc.service.problem import Problem, problem_from_reason


@pytest.mark.parametrize(
    ("reason", "code", "message", "remedy"),
    [
        ("CDC-3001 no room → add a column", "CDC-3001", "no room", "add a column"),
        (f"{SchemaNotApplicable.code} no room", SchemaNotApplicable.code, "no room", SchemaNotApplicable.remedy),
        ("CDC-9999 unknown", "CDC-9999", "unknown", "look here"),
        ("free text", None, "free text", "look here"),
    ],
)
def test_a_reason_has_code_message_and_remedy(reason: str, code: str | None, message: str, remedy: str) -> None:
    assert problem_from_reason("table t", reason, "look here") == Problem("table t", code, message, remedy)
