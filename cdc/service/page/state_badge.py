"""Pill: a state as the page shows it, in the tone of what it means."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Final

TONES: Final[Mapping[str, str]] = {
    "running": "good",
    "streaming": "good",
    "live": "good",
    "copied": "good",
    "done": "good",
    "starting": "busy",
    "snapshotting": "busy",
    "copying": "busy",
    "bootstrapping": "busy",
    "catching_up": "busy",
    "queued": "busy",
    "degraded": "warn",
    "needs_resync": "warn",
    "refused": "warn",
    "paused": "warn",
    "waiting": "warn",
    "silent": "warn",
    "late": "bad",
    "stale": "bad",
    "down": "bad",
    "failed": "bad",
    "missing": "bad",
    "stopped": "bad",
}
"""By state; others are plain."""


def badge(state: str) -> str:
    """A state with its sign."""
    tone = TONES.get(state, "plain")
    return f'<span class="pill {tone}"><i aria-hidden="true"></i>{escape(state.replace("_", " "))}</span>'
