"""Relations: which version of which table the rows of this session belong to."""

from __future__ import annotations

from collections.abc import Mapping

from cdc.pgoutput.messages import Relation
from cdc.postgres.connection import connect
from cdc.postgres.tables import resolve
from cdc.table import TableSchema

RELATION_BITS = 32
"""A relation's number is the epoch of first sight above 32 bits of OID."""


class Relations:
    """Resolves Relation messages against the log's own schemas and the source's catalogue."""

    def __init__(self, dsn: str, known: Mapping[int, TableSchema], epoch: int) -> None:
        self._dsn = dsn
        self._known = {schema.oid: schema for schema in known.values()}
        self._epoch = epoch

    def see(self, message: Relation) -> tuple[TableSchema, bool]:
        """The schema of the rows that follow, and whether the log has to be told of it.

        The catalogue shows the present and the message a moment of the past; what cannot be proved comes back
        flagged `needs_resync`, never guessed.
        """
        known = self._known.get(message.oid)
        with connect(self._dsn, application_name="cdc catalogue") as conn:
            schema = resolve(conn, message, known, self._epoch)
        changed = schema != known
        self._known[message.oid] = schema
        return schema, changed
