"""Index names: names of indexes, aliases, fields and documents for the names and keys of the source.

Names of indexes allow only lower case and few special characters. Every other byte becomes `~` and two hexadecimal
digits, as in paths of Delta targets. A name that would be too long ends with a digest instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.target_names import path_segment

LONGEST: Final = 200
"""Maximum bytes of an alias; an index name has up to 55 bytes more, and servers allow 255 bytes."""
LONGEST_ID: Final = 512
"""Maximum bytes of the id of a document."""
_DIGEST: Final = "sha256:"


def alias_name(template: str, schema: str, table: str) -> str:
    """Return the alias of a table: the template with the escaped names of schema and table.

    Different tables have different aliases.
    """
    parts = {"{schema}": schema, "{table}": table}
    name = template
    for placeholder, text in parts.items():
        name = name.replace(placeholder, _escaped(text))
    if len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{name[: LONGEST - len(digest) - 1]}~{digest}"


def index_name(alias: str, relation: int, number: int) -> str:
    """Return the name of an index of a table. number: 1 for the first index; a replay builds the next one."""
    return f"{alias}.r{relation}.{number}"


def write_alias(index: str) -> str:
    """Return the alias through which the sink writes to an index.

    Requests to this alias fail if the index was deleted. With the index name, the server would create a new index
    without a mapping.
    """
    return f"{index}.w"


def number_of(index: str) -> int:
    """Return the number of an index; the inverse of `index_name`."""
    return int(index.rpartition(".")[2])


def document_key(key: Sequence[str | None]) -> str:
    """Return the id of the document of a row: the text of a key with one column, otherwise a JSON list of texts.

    An id that would be empty or too long is a digest of the key.
    """
    first = key[0] if len(key) == 1 else None
    text = json.dumps(list(key), ensure_ascii=False) if first is None else first
    if text and len(text.encode()) <= LONGEST_ID and not text.startswith(_DIGEST):
        return text
    return f"{_DIGEST}{hashlib.sha256(json.dumps(list(key)).encode()).hexdigest()}"


def are_ids(texts: pa.Array) -> bool:
    """Return whether `document_key` returns each of these texts for a key with this one column."""
    if texts.null_count:
        return False
    lengths, digests = pc.binary_length(texts), pc.starts_with(texts, _DIGEST)
    usual = pc.and_(pc.and_(pc.greater(lengths, 0), pc.less_equal(lengths, LONGEST_ID)), pc.invert(digests))
    return bool(pc.all(usual, min_count=0).as_py())


def _escaped(name: str) -> str:
    # servers refuse a name that begins with a hyphen, and upper case
    safe = path_segment(name).lower()
    return f"~2d{safe[1:]}" if safe.startswith("-") else safe
