"""Transform: what a rule of a Delta sink makes of a table's rows before they are in the target.

`drop`, `rename` and `mask` name columns of the source. Expressions see the row as the target is to hold it: without
what was dropped, under the new names, masked. So they can always be computed, also where an update did not send all.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, model_validator

from cdc.config.expression import Expression
from cdc.config.model import Model
from cdc.config.names import Identifier, invalid
from cdc.config.secret import HIDDEN, Secret

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
        raise invalid("a salt stands in the file: write ${VAR}, {env: VAR} or {file: PATH}")
    return secret


Added = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,62}$")]
"""The name of a column that the source does not have."""


class Transform(Model):
    """What becomes of the rows of a table."""

    drop: tuple[Identifier, ...] = ()
    """Columns that the target does not have; none of the key."""
    rename: Mapping[Identifier, Identifier] = {}
    """Column → its name in the target."""
    mask: Mapping[Identifier, Annotated[str, AfterValidator(_mask)]] = {}
    """Column → how its text is hidden; none of the key. `sha256`: as 64 hexadecimal digits, equal for equal values
    (HMAC with `salt`); `keep_last:4`: every character but the last 4 as `*`; `redact`: as `***`. NULL stays NULL."""
    salt: Annotated[Secret, AfterValidator(_salt)] | None = None
    """What `sha256` is keyed with, by reference: without one, whoever can guess a value can find it."""
    python: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = None
    """`package.module:function` that takes an Arrow table and returns one with the same rows and other columns."""
    computed: Mapping[Added, Expression] = {}
    """New column → expression of Spark SQL over the columns of the target."""
    where: Expression | None = None
    """Condition in Spark SQL over the columns of the target; a row for which it is not true is not in it."""

    @property
    def in_spark(self) -> bool:
        """Whether it takes Spark."""
        return bool(self.computed) or self.where is not None

    @property
    def hides(self) -> bool:
        """Whether a target shows less of the rows than the source has."""
        return bool(self.drop or self.mask or self.python) or self.where is not None

    @property
    def fingerprint(self) -> str:
        """Names the transform, salt included, without revealing it: rows made by another one are other rows."""
        text = self.model_dump(mode="json", exclude={"salt"})
        salt = b"" if self.salt is None else self.salt.reveal().encode()
        return hmac.digest(salt, json.dumps(text, sort_keys=True).encode(), hashlib.sha256).hex()[:32]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for name in self.drop:
            if name in self.rename or name in self.mask:
                raise invalid("column {name} is dropped: it can be neither renamed nor masked", name=repr(name))
        made = [*self.rename.values(), *self.computed]
        if twice := {name for name in made if made.count(name) > 1}:
            raise invalid("two columns would be called {name}", name=repr(min(twice)))
        if hashed := [name for name, how in self.mask.items() if how == SHA256 and self.salt is None]:
            raise invalid("required key is missing: salt, with which sha256 hides {name}", name=repr(hashed[0]))
        if self.salt is not None and SHA256 not in self.mask.values():
            raise invalid("salt is nothing for a rule that masks no column with sha256")
        return self
