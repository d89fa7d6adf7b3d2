"""Computed views: what a commit of the log of views says of each view, and at which positions the view was exact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Self

COMMITS_PER_CUT: Final = 8
"""The LSN of a commit record is a multiple of 8. So a position of the log of views names the cut to which it belongs:
the first commit at a cut has the position of the cut, and further ones the positions after it."""


def cut_of_commit(position: int) -> int:
    """Return the position of the cut of the tables to which a commit of the log of views belongs."""
    return position - position % COMMITS_PER_CUT


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit of the log of views: its position, its cut, and the cut of the commit before; 0 if there is none."""

    position: int
    cut: int
    last_cut: int


@dataclass(frozen=True, slots=True)
class InputVersion:
    """The version of one input at the cut from which the views were computed."""

    target: str
    """URI of the Delta table."""
    version: int
    relation: int
    """The log's number of the source table."""
    parked: tuple[tuple[str, ...], ...] = ()
    """Keys of the parked rows, of which the table has an older version or none."""


@dataclass(frozen=True, slots=True)
class ComputedView:
    """How the rows of a view in the log were computed."""

    fingerprint: str
    """Hash of the definition with which they were computed."""
    position: int
    """Position of the cut of which they are the result."""
    inputs: Mapping[str, InputVersion] = field(default_factory=dict)
    """Topic → version of each input at this cut."""
    floor: int | None = None
    """Time before which rows were left out, in microseconds since 1970 UTC; None: no row was left out."""
    followed_from: int = 0
    """From this position of the log of views up to `position`, the view was computed at each cut of the log. It is
    after `position` if the view was behind at its last commit. 0: unknown."""

    def was_at(self, position: int) -> bool:
        """Return whether the view, at a position of the log of views, was computed at the cut of this position."""
        return 0 < self.followed_from <= position and cut_of_commit(position) <= self.position

    def committed(self, commit: Committed, earlier: ComputedView | None) -> ComputedView:
        """Return the view as a commit of the log of views records it.

        earlier: how the view was computed at the commit before; None if it was not.
        """
        if self == earlier:
            return self
        continues = (
            earlier is not None
            and earlier.fingerprint == self.fingerprint
            and earlier.position == commit.last_cut
            and self.position == commit.cut
            and 0 < earlier.followed_from <= earlier.position
        )
        return replace(
            self, followed_from=earlier.followed_from if earlier is not None and continues else commit.position
        )


@dataclass(frozen=True, slots=True)
class ComputedFrom:
    """What the views were computed from at the end of the log of views."""

    cut: int = 0
    """Position of the last cut at which views were computed; single views may be behind it."""
    views: Mapping[str, ComputedView] = field(default_factory=dict)
    """Topic of each view that is complete → how it was computed."""

    def was_at(self, topic: str, position: int) -> bool:
        """Return whether a view, at a position of the log of views, was computed at the cut of this position."""
        return topic in self.views and self.views[topic].was_at(position)

    def to_json(self) -> str:
        """Return the text that a commit contains. It has each version of an input once, because many views have it."""
        versions = list(dict.fromkeys(one for view in self.views.values() for one in view.inputs.values()))
        number_of = {version: number for number, version in enumerate(versions)}
        views = {
            topic: {
                "fingerprint": view.fingerprint,
                "position": view.position,
                "inputs": {topic: number_of[version] for topic, version in view.inputs.items()},
                "floor": view.floor,
                "followed_from": view.followed_from,
            }
            for topic, view in self.views.items()
        }
        return json.dumps({"cut": self.cut, "versions": [*map(asdict, versions)], "views": views}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of `to_json`; an empty text gives an empty object.

        Texts of earlier releases do not say which inputs each view had, so its next computation is a whole one.
        """
        found = json.loads(text or "{}")
        versions = [
            InputVersion(**{**fields, "parked": tuple(map(tuple, fields["parked"]))})
            for fields in found.get("versions", [])
        ]
        views = {
            topic: ComputedView(
                fields["fingerprint"],
                fields["position"],
                {input_: versions[number] for input_, number in fields.get("inputs", {}).items()},
                fields["floor"],
                fields.get("followed_from", 0),
            )
            for topic, fields in found.get("views", {}).items()
        }
        return cls(found.get("cut", 0), views)
