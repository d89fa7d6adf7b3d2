"""Contract of a kind of sink: every kind has every member of it."""

from __future__ import annotations

import inspect

import pytest

from pipelines.sink_kinds import KINDS
from pipelines.sinks.sink_kind import SinkKind

MEMBERS = {name for name in vars(SinkKind) if not name.startswith("_")}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_has_the_members_of_the_contract_with_the_same_parameters(name: str) -> None:
    kind = KINDS[name]()

    assert {member for member in MEMBERS if not hasattr(kind, member)} == set()
    for member in MEMBERS:
        wanted = getattr(SinkKind, member)
        if inspect.isfunction(wanted):
            _, *parameters = inspect.signature(wanted).parameters
            assert [*inspect.signature(getattr(kind, member)).parameters] == parameters
