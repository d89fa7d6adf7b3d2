"""Model: the base class of all pydantic models of a definition."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """A part of a definition."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
        defer_build=True,  # one validator for a whole definition instead of one more for each of its parts
    )
