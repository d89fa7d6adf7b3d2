"""Transform: how a rule of a sink changes the rows of a table before they are written to the target.

`drop`, `rename` and `mask` name columns of the source. Expressions are computed from the columns of the target:
a dropped column is missing, a renamed column has its new name, a masked column has the masked value. The reason: if an
update has unsent columns, they are filled in from the stored row of the target before an expression is computed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, model_validator

from cdc.config.field_types import Identifier, Model, invalid
from cdc.config.secret import HIDDEN, Secret
from cdc.config.sql_expression import Expression

SHA256: Final = "sha256"
REDACT: Final = "redact"
KEEP_LAST: Final = "keep_last"
_MASK: Final = re.compile(rf"{SHA256}|{REDACT}|{KEEP_LAST}:[1-9]\d?")


def _mask(text: str) -> str:
    if not _MASK.fullmatch(text):
        raise invalid("expected sha256, redact, or keep_last:N with N from 1 to 99")
    return text


def _salt(secret: Secret) -> Secret:
    if secret.reference == HIDDEN:
        raise invalid("the salt is in plain text in the definition: write ${VAR}, {env: VAR} or {file: PATH}")
    return secret


Added = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,62}$")]
"""Name of a column that the source does not have."""


class Transform(Model):
    """Transformation of the rows of a table."""

    drop: tuple[Identifier, ...] = ()
    """Columns that the target does not have; a column of the key cannot be dropped."""
    rename: Mapping[Identifier, Identifier] = {}
    """Map of a column to its name in the target."""
    mask: Mapping[Identifier, Annotated[str, AfterValidator(_mask)]] = {}
    """Map of a column to its mask; a column of the key cannot be masked. `sha256` writes 64 hexadecimal digits, equal
    for equal values (HMAC with `salt`); `keep_last:4` replaces every character but the last 4 by `*`; `redact` writes
    `***`. NULL stays NULL."""
    shown: Mapping[Identifier, tuple[Identifier, ...]] = {}
    """Map of a column to former names of it that a rule hides. Without it, a table stops if a hidden column gets a name
    that the rule shows; with it, the values of the column are shown."""
    salt: Annotated[Secret, AfterValidator(_salt)] | None = None
    """HMAC key of `sha256`, as a reference such as `${VAR}`. `sha256` requires it, so that nobody can test guessed
    values."""
    python: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = None
    """Python function, as `package.module:function`, that takes an Arrow table and returns an Arrow table with one row
    for each given row, in the same order. Columns may differ, except those of the key."""
    computed: Mapping[Added, Expression] = {}
    """Map of a new column to its expression in Spark SQL over the columns of the target."""
    where: Expression | None = None
    """Condition in Spark SQL over the columns of the target; the target contains the rows for which it is true."""

    @property
    def needs_spark(self) -> bool:
        """True if the transform contains expressions of Spark SQL."""
        return bool(self.computed) or self.where is not None

    @property
    def hides_data(self) -> bool:
        """True if the target contains less data than the source."""
        return bool(self.drop or self.mask or self.python) or self.where is not None

    @property
    def fingerprint(self) -> str:
        """Hash of the transform, keyed with its salt. If the hash changes, a replay must rewrite the target."""
        text = self.model_dump(mode="json", exclude={"salt"} if self.shown else {"salt", "shown"})
        salt = b"" if self.salt is None else self.salt.reveal().encode()
        return hmac.digest(salt, json.dumps(text, sort_keys=True).encode(), hashlib.sha256).hex()[:32]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for name in self.drop:
            if name in self.rename or name in self.mask or name in self.shown:
                raise invalid(
                    "column {name} is in 'drop', so it can be neither renamed nor masked nor shown", name=repr(name)
                )
        made = [*self.rename.values(), *self.computed]
        if twice := {name for name in made if made.count(name) > 1}:
            raise invalid("two columns of the target would have the name {name}", name=repr(min(twice)))
        if hashed := [name for name, how in self.mask.items() if how == SHA256 and self.salt is None]:
            raise invalid(
                "'salt' is required: it is the HMAC key of the mask 'sha256' of column {name}", name=repr(hashed[0])
            )
        if self.salt is not None and SHA256 not in self.mask.values():
            raise invalid("'salt' has no effect: no column is masked with 'sha256'")
        return self
