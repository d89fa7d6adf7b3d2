"""Sparkline: the lag of the last minutes as an SVG, drawn on the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

WIDTH: Final = 168
HEIGHT: Final = 36
_TOP: Final = 3
"""Space above the curve, so that its stroke is not clipped."""
FLOOR_SECONDS: Final = 1.0
"""Minimum top of the scale: a curve between 10 and 20 ms must look flat."""


def sparkline(values: Sequence[float], label: str) -> str:
    """An `<svg>` of a lag in seconds, oldest value on the left; label is plain text, already escaped."""
    if not values:
        return (
            f'<svg class="spark" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}: no values yet"></svg>'
        )
    points = _points(values)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    last_x, last_y = points[-1]
    area = f"{points[0][0]:.1f},{HEIGHT} {line} {last_x:.1f},{HEIGHT}"
    return (
        f'<svg class="spark" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}: now {values[-1]:.2f} s, worst {max(values):.2f} s">'
        f'<polygon class="area" points="{area}"/><polyline class="line" points="{line}"/>'
        f'<path class="now" d="M{last_x:.1f},{last_y:.1f}h0"/></svg>'
    )


def _points(values: Sequence[float]) -> list[tuple[float, float]]:
    top = max(FLOOR_SECONDS, *values)
    span = HEIGHT - 2 * _TOP
    shown = values if len(values) > 1 else [values[0], values[0]]
    step = (WIDTH - 6) / (len(shown) - 1)
    return [(2 + number * step, HEIGHT - _TOP - value / top * span) for number, value in enumerate(shown)]
