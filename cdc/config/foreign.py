"""Words of other tools that a definition has not: why there is none, and what does the same; pure."""

from __future__ import annotations

from typing import Final

POLICIES: Final = {"reject": "'exact' is that policy, for it refuses what a type cannot hold and changes nothing"}
"""Words for a policy of types that is called otherwise here."""
