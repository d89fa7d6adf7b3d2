"""State badge: a state in the colour of its meaning."""

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
"""Colour class by state; other states are plain."""


def badge(state: str) -> str:
    """A state as HTML."""
    tone = TONES.get(state, "plain")
    return f'<span class="pill {tone}"><i aria-hidden="true"></i>{escape(state.replace("_", " "))}</span>'
