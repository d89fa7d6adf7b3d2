"""Search sink: writes the tables of a sink into one tantivy index, with one commit per batch.

`apply` checks a batch and stores its rows in memory, masked and without hidden columns. `publish` writes these rows,
the parked rows, the published record and the rules of the documents in one commit of the index. So after a crash the
index is as it was at the last publish, and the batch is applied again.

Executors do not write the index, also not the rows of a large range that they have folded: its files are on the disk of
the apply process, which gets all rows of the sink. Indexes on a search server have no such limit.

The sink has the only writer of the index from `open` to `close`. The writer has a file lock (flock). The operating
system releases the lock when the process ends. So `open` fails for a second driver on the same machine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog
import tantivy

from cdc import atomic_file
from cdc.config import DeadLetterSettings
from cdc.errors import (
    SinkFenced,
    SinkOfAnotherLog,
    SinkUnavailable,
    TargetRulesChanged,
)
from cdc.failpoint import hit
from cdc.position import Position
from cdc.table import TableSchema
from cdc.targets.dead_letter_rows import Image, Key, ParkedRow
from cdc.targets.search_index_reader import (
    OWNER_ID,
    PUBLISHED_ID,
    RULES_ID,
    DocumentRules,
    decode_image,
    document_id,
    layout,
    parked_rows,
    stored_image,
    stored_rules,
)
from pipelines.folding.spark_fold import collect_parts
from pipelines.sinks.contract import (
    NONE_PARKED,
    ImageMask,
    Published,
    RefusedRow,
    SchemasAt,
    TableBatch,
    TableRecord,
    no_schemas,
)
from pipelines.sinks.record_after_batch import applied_state, is_done, key_required, missing_base
from pipelines.sinks.search.document_shape import DocumentShape, DocumentShapes
from pipelines.sinks.search.documents import (
    DeadLetterDocuments,
    PendingTable,
    divide_rows,
    index_access,
    masked_upserts,
    on_disk,
    replace_reserved,
    rules_of_shape,
    rules_text,
)
from pipelines.sinks.search.rule_changes import check_follows, follow_rules, rewrite_documents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WRITER_BYTES: Final = 64 * 1024 * 1024
"""Bytes that tantivy buffers before it writes a file; tantivy requires at least 15 MB per thread."""
KEEP_ATTEMPTS: Final = 20
"""Maximum attempts to link the files of the index for `pin`; an attempt fails if tantivy removes a file meanwhile."""
NO_ROWS: Final = pa.schema(
    [
        pa.field("op", pa.string()),
        pa.field("key", pa.list_(pa.string())),
        pa.field("position", pa.int64()),
        pa.field("ordinal", pa.int64()),
        pa.field("after", pa.map_(pa.int32(), pa.string())),
        pa.field("complete", pa.bool_()),
        pa.field("base", pa.list_(pa.string())),
    ]
).empty_table()
"""An empty table with the columns that this module reads, for a batch without rows (for example, only a truncate)."""
log = structlog.get_logger("apply")


class SearchSink:
    """Implements pipelines.sinks.contract.ParkingSink; the target of all tables is one tantivy index.

    Applying a batch twice has the same effect as applying it once. The sink refuses tables without a key, because each
    document needs an id. The only rows that it parks are partial images without a base row. shapes: which columns and
    masks the documents of each table have. dead_letters: how many rows of a table may be parked.
    """

    parallel = 1
    """1, because a tantivy index has one writer."""
    parallel_from = 0

    def __init__(
        self,
        name: str,
        path: str | Path,
        shapes: DocumentShapes | None = None,
        dead_letters: DeadLetterSettings = NONE_PARKED,
    ) -> None:
        self.name = name
        self.parked = DeadLetterDocuments()
        self._path = Path(path)
        self._shapes = DocumentShapes() if shapes is None else shapes
        self._dead_letters = dead_letters
        self._index: tantivy.Index | None = None
        self._writer: tantivy.IndexWriter | None = None
        self._record: bytes | None = None
        self._published: Published | None = None
        self._rules: dict[int, DocumentRules] = {}
        """Relation → rules of its documents in the index."""
        self._stopped: dict[int, TargetRulesChanged] = {}
        """Relation → why its documents cannot follow the rules."""
        self._pending: dict[int, PendingTable] = {}

    def attach(self, spark: SparkSession) -> None:
        """Ignore the Spark session, because the driver alone writes the index."""

    def open(
        self,
        log_id: str,
        schemas_at: SchemasAt = no_schemas,  # noqa: ARG002 - rows and record are published together
    ) -> Published | None:
        """Open the index for writing and return its published record, None if nothing was published.

        Batches that were applied and not published are dropped. If the rules of the sink changed, the documents are
        made to follow them; see `rule_changes`. Raises SinkUnavailable if another process has the writer of the index,
        and SinkOfAnotherLog for an index of another log or with another layout.
        """
        self.close()
        self._path.mkdir(parents=True, exist_ok=True)
        try:
            self._index = tantivy.Index(layout(), str(self._path))
        except ValueError as error:
            raise SinkOfAnotherLog(f"search index {str(self._path)!r} cannot be opened for writing: {error}") from error
        self._writer = self._take_writer(self._index)
        try:
            self._claim(log_id)
            self._load()
            self._follow_rules()
            # a process that was killed after a commit leaves the files that the commit replaced
            self._writer.garbage_collect_files()
        except BaseException:
            self.close()
            raise
        return self._published

    def parking_limits(self, schema: TableSchema) -> DeadLetterSettings:
        """See ParkingSink.parking_limits. For a table without a key, no row is parked: `apply` refuses the table."""
        return self._dead_letters if self._shapes.parks_rows(schema) else NONE_PARKED

    def image_mask(self, schema: TableSchema) -> ImageMask:
        """See ParkingSink.image_mask."""
        return self._shapes.of(schema).parked_image

    def keeps_history(self, schema: TableSchema) -> bool:  # noqa: ARG002 - an index has only current rows
        """See ParkingSink.keeps_history."""
        return False

    def target_position(self, schema: TableSchema) -> int:  # noqa: ARG002 - an index has nothing that was not published
        """See ParkingSink.target_position."""
        return 0

    def find_refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """Return the batch's partial images that have no base row. The list may be slightly longer than `limit`; see
        ParkingSink.
        """
        if batch.rows is None or batch.is_copying:
            return []
        without_base = (number for number, base in self._bases(batch.schema, batch.rows) if base is None)
        found, positions = islice(without_base, limit + 1), batch.rows["position"]
        return [RefusedRow(number, missing_base(batch.schema, positions[number].as_py())) for number in found]

    def apply(self, batch: TableBatch) -> TableRecord:
        """Check the batch of one table, keep it in memory until `publish`, and return the table's new record.

        A batch changes nothing if the published position of the table is at or after the end of the batch. It also
        changes nothing if the table failed at a position before the start of the batch. In both cases the published
        record of the table is returned.

        Raises MissingBase for a partial image without a base row, SchemaNotApplicable for a table without a key, and
        the errors of `DocumentShapes.of`. Raises TargetRulesChanged if the documents of the table cannot follow the
        rules. After such an error the documents of the table do not change.
        """
        relation = batch.schema.relation
        current = self._published_record(relation)
        if current is not None and is_done(current, batch):
            return current
        self._pending.pop(relation, None)
        shape = self._shape(batch.schema, current)
        floor = current.position if current is not None else -1
        deleted, upserts = divide_rows(self._new_rows(batch, floor))
        parts = masked_upserts(upserts, shape)
        texts = pa.concat_tables(parts) if batch.frame is None else on_disk(parts, self._path.parent)
        self._pending[relation] = PendingTable(
            schema=batch.schema,
            rules=rules_of_shape(shape),
            upto=batch.upto,
            erase_all=batch.truncated is not None and batch.truncated[0] > floor,
            erase_below=batch.generation,
            deleted=deleted,
            upserts=texts,
            completed=self._complete(batch, upserts, texts, shape),
        )
        return TableRecord(
            relation=relation,
            topic=batch.schema.topic,
            target=str(self._path),
            position=batch.upto,
            version=None,
            state=applied_state(batch, current, complete=True).value,
            schema=batch.schema.to_json().decode(),
        )

    def publish(self, record: Published) -> None:
        """Write the applied batches, their parked rows and the record in one commit of the index.

        A batch is not written if it ends after the position of its table in `record`. Raises SinkUnavailable if
        tantivy cannot write or commit, and SinkFenced if another driver published. After any error the index is
        unchanged.
        """
        writer = self._open_writer()
        written = [pending for pending in self._pending.values() if _is_listed(record, pending)]
        with self._undone_on_error(writer):
            self._check_not_overtaken()
            for pending in written:
                pending.write(self._open_index(), writer)
                self.parked.put(writer, pending.schema.relation)
            self._commit(record, self._rules | {pending.schema.relation: pending.rules for pending in written})
        self.parked.committed(pending.schema.relation for pending in written)
        self._pending.clear()

    def pin(self, record: Published) -> str:
        """Keep the published cut readable; return the path of a directory with hard links to the files of the index."""
        cut = self._cuts / str(record.position)
        shutil.rmtree(cut, ignore_errors=True)
        for _ in range(KEEP_ATTEMPTS):
            shutil.rmtree(cut, ignore_errors=True)
            cut.mkdir(parents=True)
            if _linked(self._path, cut):
                return str(cut)
        raise SinkUnavailable(
            f"search index {str(self._path)!r} cannot keep the cut at {Position(record.position)!s} readable: "
            "in each attempt to link its files, tantivy removed one of them"
        )

    def release(self, handle: str) -> None:
        """Remove the directory of a pinned cut, if it still exists. handle: the result of `pin`."""
        shutil.rmtree(handle, ignore_errors=True)

    def close(self) -> None:
        """Release the writer of the index; applied batches that were not published are dropped."""
        self._pending.clear()
        if self._writer is not None:
            self._roll_back(self._writer)
        # deleting the writer object releases its lock; tantivy-py has no other way
        self._writer = None
        self._index = None

    def _check_not_overtaken(self) -> None:
        with index_access():
            self._open_index().reload()
            stored = self._stored(PUBLISHED_ID)
        if stored != self._record:
            raise SinkFenced(
                f"another process published to search index {str(self._path)!r} after this process last read it"
            )

    def _commit(self, record: Published, rules: dict[int, DocumentRules]) -> None:
        """Commit what the writer has, with the record, and with the rules if they changed."""
        writer, content = self._open_writer(), record.to_json()
        replace_reserved(writer, PUBLISHED_ID, content)
        if rules != self._rules:
            replace_reserved(writer, RULES_ID, rules_text(rules))
        hit("search_before_commit")
        with index_access():
            writer.commit()
        atomic_file.sync(self._path)  # tantivy syncs its files, but not the name of the new `meta.json`
        hit("search_after_commit")
        with index_access():
            self._open_index().reload()
        self._rules, self._record, self._published = rules, content.encode(), record

    def _load(self) -> None:
        """Read the published record, the rules and the parked rows of the index."""
        index = self._open_index()
        self._record = self._stored(PUBLISHED_ID)
        self._published = None if self._record is None else Published.from_json(self._record.decode())
        self._rules = stored_rules(index.searcher(), index.schema)
        self.parked.load(self._stored_parked())

    def _follow_rules(self) -> None:
        """Make the documents follow the rules of the sink, and stop the tables whose documents cannot follow them."""
        self._stopped = {}
        if self._published is None:
            return
        followed = follow_rules(self._published, self._rules, self._shapes, self.name)
        self._stopped = followed.errors
        if followed.record == self._published and not followed.changes:
            return
        writer = self._open_writer()
        with self._undone_on_error(writer):
            if followed.changes:
                # before the commit: a process that is killed after it does not come back here
                shutil.rmtree(self._cuts, ignore_errors=True)
                rewrite_documents(self._open_index(), writer, followed)
                self._rules = {}  # the document with the rules was deleted, so it has to be written
            self._commit(followed.record, followed.rules)
        log.info("the index follows the changed rules of its sink", sink=self.name, tables=len(followed.changes))
        self._load()

    def _shape(self, schema: TableSchema, current: TableRecord | None) -> DocumentShape:
        """Return the shape of a table's documents. Raises the errors that `apply` describes."""
        if (error := self._stopped.get(schema.relation)) is not None:
            raise error
        shape = self._shapes.of(schema)
        if current is None:
            self._shapes.check_named(schema)
        elif current.schema is not None:
            before = TableSchema.from_json(current.schema)
            check_follows(self._rules.get(schema.relation) or DocumentRules.plain(before), shape, before, schema)
        return shape

    @property
    def _cuts(self) -> Path:
        return self._path.with_name(f"{self._path.name}.cuts")

    def _take_writer(self, index: tantivy.Index) -> tantivy.IndexWriter:
        try:
            return index.writer(heap_size=WRITER_BYTES, num_threads=1)
        except ValueError as error:
            raise SinkUnavailable(
                f"cannot lock search index {str(self._path)!r} for writing; another process probably has the lock: "
                f"{error}",
                remedy="stop the other apply process; this one then continues without a restart",
            ) from error

    def _open_writer(self) -> tantivy.IndexWriter:
        if self._writer is None:
            raise SinkUnavailable(f"sink {self.name!r} is not open")
        return self._writer

    def _open_index(self) -> tantivy.Index:
        if self._index is None:
            raise SinkUnavailable(f"sink {self.name!r} is not open")
        return self._index

    def _claim(self, log_id: str) -> None:
        owner = self._stored(OWNER_ID)
        if owner is None:
            writer = self._open_writer()
            replace_reserved(writer, OWNER_ID, log_id)
            writer.commit()
            self._open_index().reload()
        elif owner.decode() != log_id:
            raise SinkOfAnotherLog(f"search index {str(self._path)!r} was written from another log: {owner.decode()!r}")

    def _stored(self, identity: str) -> bytes | None:
        index = self._open_index()
        return stored_image(index.searcher(), index.schema, identity)

    def _stored_parked(self) -> dict[int, dict[Key, ParkedRow]]:
        index = self._open_index()
        return {} if self._published is None else parked_rows(index.searcher(), index.schema, self._published)

    def _published_record(self, relation: int) -> TableRecord | None:
        return None if self._published is None else self._published.tables.get(relation)

    def _new_rows(self, batch: TableBatch, floor: int) -> pa.Table:
        relation, rows = batch.schema.relation, batch.rows
        if batch.frame is not None:
            # the driver alone writes the index, but its memory cannot contain all rows of a frame
            parts = (part.select(NO_ROWS.column_names) for part in collect_parts(batch.frame))
            rows = on_disk((part.filter(self._are_new(relation, part, floor)) for part in parts), self._path.parent)
        elif rows is not None:
            rows = rows.filter(self._are_new(relation, rows, floor))
        if rows is None:
            rows = NO_ROWS
        if rows["key"].null_count:
            raise key_required(batch.schema)
        return rows

    def _are_new(self, relation: int, rows: pa.Table, floor: int) -> pa.ChunkedArray:
        """Return one bool per row: whether the sink must write the row.

        The sink must write each row after position `floor`, and each parked row that it tries again.
        """
        is_new, parked_by_key = pc.greater(rows["position"], floor), self.parked.rows_of(relation)
        if not parked_by_key or pc.all(is_new).as_py():
            return is_new
        places = zip(*(rows[c].to_pylist() for c in ("key", "position", "ordinal")), strict=True)
        parked = [
            key is not None and (row := parked_by_key.get(tuple(key))) is not None and row.place == tuple(place)
            for key, *place in places
        ]
        return pc.or_(is_new, pa.chunked_array([parked], pa.bool_()))

    def _bases(self, schema: TableSchema, rows: pa.Table) -> Iterator[tuple[int, bytes | None]]:
        """Yield (row number, stored image of its base row) for each partial image; the image is None if the index has
        no base row.
        """
        partial = pc.and_(pc.equal(rows["op"], "u"), pc.invert(rows["complete"]))
        for number in np.flatnonzero(pc.fill_null(partial, fill_value=False).to_numpy()).tolist():
            base = rows["base"][number].as_py() or rows["key"][number].as_py()
            yield number, self._stored(document_id(schema.relation, base))

    def _complete(
        self, batch: TableBatch, upserts: pa.Table, texts: pa.Table, shape: DocumentShape
    ) -> dict[int, Image | None]:
        """Return row number → complete image, for each partial image.

        texts: the masked texts of the upserts. The image is None if a running full copy has not copied the base row
        yet. Raises MissingBase if no copy is running and the base row is missing.
        """
        completed, missing = dict[int, Image | None](), shape.missing
        for number, stored in self._bases(batch.schema, upserts):
            if stored is None and batch.is_copying:
                completed[number] = None
                continue
            if stored is None:
                raise missing_base(batch.schema, upserts["position"][number].as_py())
            earlier, sent = decode_image(stored), {column for column, _ in upserts["after"][number].as_py() or ()}
            completed[number] = {
                column: texts[str(column)][number].as_py() if column in sent else earlier.get(column, default)
                for column, default in missing.items()
            }
        if waiting := sum(image is None for image in completed.values()):
            log.debug(
                "partial images are left out, because the running full copy will write their rows",
                table=batch.schema.topic,
                images=waiting,
            )
        return completed

    def _roll_back(self, writer: tantivy.IndexWriter) -> None:
        try:
            writer.rollback()
        except ValueError:
            # for example, the directory of the index was removed; another rollback of this writer would panic
            self._writer = self._index = None

    @contextmanager
    def _undone_on_error(self, writer: tantivy.IndexWriter) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._roll_back(writer)
            if not isinstance(error, OSError):
                raise
            raise SinkUnavailable(
                f"cannot commit to search index {str(self._path)!r}: {error}",
                remedy="check free space and permissions of the index directory; the sink retries until it can commit",
            ) from error


def _is_listed(record: Published, pending: PendingTable) -> bool:
    """Return whether the record contains the batch's table, with a position at or after the end of the batch."""
    listed = record.tables.get(pending.schema.relation)
    return listed is not None and listed.position >= pending.upto


def _linked(index: Path, cut: Path) -> bool:
    """Link the committed files of the index into directory `cut`. Return False if tantivy removed a file during the
    linking.
    """
    meta = (index / "meta.json").read_bytes()
    segments = {segment["segment_id"].replace("-", "") for segment in json.loads(meta)["segments"]}
    try:
        for file in index.iterdir():
            if file.name.partition(".")[0] in segments:
                atomic_file.link(file, cut / file.name)
        (cut / "meta.json").write_bytes(meta)
        tantivy.Index.open(str(cut)).searcher()
    except (FileNotFoundError, ValueError):
        return False
    return True
