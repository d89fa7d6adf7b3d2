"""Computes the coordinates of the page's charts: the lag curves and the bar of the log's sizes.

The server computes them, so the page shows the charts without a library and without JavaScript.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

CURVE_WIDTH: Final = 168
CURVE_HEIGHT: Final = 36
_MARGIN: Final = 3
"""Space above and below a curve, so that the curve's stroke is not clipped."""
MIN_SCALE_SECONDS: Final = 1.0
"""Lag in seconds at the top of a curve's scale if all lags are shorter, so that differences of 10 ms look flat."""
BAR_WIDTH: Final = 1000
MIN_PART_WIDTH: Final = 6.0
"""Minimum width of a bar part whose size is not 0."""


@dataclass(frozen=True, slots=True)
class LagCurve:
    """Coordinates of a curve of lags, oldest lag on the left; all coordinates are empty without lags."""

    label: str
    """Text that describes the curve to screen readers."""
    line: str = ""
    """Points of the polyline."""
    area: str = ""
    """Points of the polygon below the polyline."""
    end: str = ""
    """Coordinates of the newest lag."""


@dataclass(frozen=True, slots=True)
class BarPart:
    """One part of a bar that is divided in proportion to sizes."""

    name: str
    left: float
    width: float


def lag_curve(lags: Sequence[float], label: str) -> LagCurve:
    """Return the curve of these lags, which are in seconds."""
    if not lags:
        return LagCurve(f"{label}: no values yet")
    points = _points(lags)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    last_x, last_y = points[-1]
    return LagCurve(
        label=f"{label}: now {lags[-1]:.2f} s, worst {max(lags):.2f} s",
        line=line,
        area=f"{points[0][0]:.1f},{CURVE_HEIGHT} {line} {last_x:.1f},{CURVE_HEIGHT}",
        end=f"{last_x:.1f},{last_y:.1f}",
    )


def bar_parts(sizes: Mapping[str, int]) -> list[BarPart]:
    """Return the parts of a bar from left to right, one for each named size."""
    total, left, parts = sum(sizes.values()), 0.0, []
    for name, size in sizes.items():
        width = max(MIN_PART_WIDTH, size / total * BAR_WIDTH) if size else 0.0
        parts.append(BarPart(name, left, width))
        left += width
    return parts


def _points(lags: Sequence[float]) -> list[tuple[float, float]]:
    top = max(MIN_SCALE_SECONDS, *lags)
    height = CURVE_HEIGHT - 2 * _MARGIN
    shown = lags if len(lags) > 1 else [lags[0], lags[0]]
    step = (CURVE_WIDTH - 6) / (len(shown) - 1)
    return [(2 + number * step, CURVE_HEIGHT - _MARGIN - lag / top * height) for number, lag in enumerate(shown)]
