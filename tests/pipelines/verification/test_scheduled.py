"""The process that the server starts to verify what is due."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

from cdc.catalog.verification_state import NEXT_AT
from tests.catalog.test_verified_ranges import range_of
from tests.fixtures.waiting import until
from tests.pipelines.verification.table_of_every_type import Target, VerifiedPipeline, typed


def run(pipeline: VerifiedPipeline) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and envelopes of the process."""
    path = pipeline.folder / "pipeline.yaml"
    # a busy machine compares for a second, and would then rest for a hundred
    path.write_text(f"{path.read_text()}verify: {{every: 1d, max_cpu: 1.0}}\n")
    command = [sys.executable, "-m", "pipelines", "verify", "--scheduled", "--json", "-c", str(path)]

    def has_ended() -> bool:
        pipeline.alive()
        return child.poll() is not None

    with pipeline.apply(), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            until(has_ended, "the end of the process")
        finally:
            child.kill()
        printed = child.communicate()[0]
    return child.returncode, [json.loads(line) for line in printed.splitlines()]


def test_it_verifies_what_is_due_forgets_former_sinks_and_says_when_the_next_pass_is_due(
    pipeline: VerifiedPipeline,
) -> None:
    pipeline.fill({"lake": typed().slice(1)})
    pipeline.catalog.verified.record("kinds", range_of(sink="former", mismatched=3))
    before = datetime.now(UTC)
    status, envelopes = run(pipeline)
    assert status == 4
    (differs, last) = envelopes
    assert differs["error"]["code"] == "CDC-6001"
    next_at = datetime.fromisoformat(last["result"][NEXT_AT])
    assert before + timedelta(days=1) <= next_at <= datetime.now(UTC) + timedelta(days=1)
    (recorded,) = pipeline.catalog.verified.ls("kinds")
    assert (recorded.sink, recorded.mismatched) == ("lake", 1)


def test_a_table_that_cannot_be_compared_is_no_mismatch(pipeline: VerifiedPipeline) -> None:
    """Its rule filters rows by an expression, which no verification evaluates."""
    pipeline.fill({"lake": Target(typed(), rule="transform: {where: 'id > 0'}")})
    _, envelopes = run(pipeline)
    assert "verify does not evaluate expressions" in envelopes[0]["result"]["reason"]
    assert pipeline.catalog.verified.ls("kinds") == []
