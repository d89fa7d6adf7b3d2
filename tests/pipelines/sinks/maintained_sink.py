"""A Delta sink that merges small batches, with the maintenance of its target and a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from deltalake import DeltaTable

from cdc.position import Position
from cdc.target_names import published_uri
from cdc.targets.lake_reader import Lake, read_target
from cdc.targets.published_record import Published, TableRecord
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.maintenance import TargetMaintenance, UpkeepSettings
from pipelines.sinks.delta.published_cuts_table import PublishedTable
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, batch, put

LOG = "log-1"


@dataclass
class Clock:
    """Seconds, as the test says them."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class MaintainedSink:
    """One table; every round puts one more row, numbered from 1, and changes the first one."""

    folder: Path
    settings: UpkeepSettings
    clock: Clock = field(default_factory=Clock)
    rounds: int = 0
    writer: Writer = Writer.COPY_ON_WRITE
    """Copy-on-write replaces the file of the first row in every round; deletion vectors keep it."""

    def __post_init__(self) -> None:
        self.path = f"{self.folder}/{{schema}}/{{table}}"
        self.uri = f"{self.folder}/shop/orders"
        self.sink = DeltaSink(DeltaSettings("lake", self.path, self.writer, upkeep=UpkeepSettings(every=0)))
        self.sink.open(LOG)
        self.upkeep = TargetMaintenance(self.settings, self.clock, self.sink.parts.rewriter)

    def applied(self) -> TableRecord:
        """One more round, merged and not published."""
        self.rounds += 1
        upto, first = self.rounds * 10, self.rounds == 1
        rows = [put(1, str(self.rounds), upto)] if first else [
            put(1, str(self.rounds), upto), put(self.rounds, "x", upto, ordinal=1)
        ]  # fmt: skip
        return self.sink.apply(batch(rows, upto - 10, upto, generation=1 if first else None))

    def round(self) -> TableRecord:
        """One more round, published; a turn of the upkeep follows."""
        record = self.applied()
        self.sink.publish(Published(record.position, record.position, {ORDERS.relation: record}))
        self.look()
        return record

    def look(self, kind: type[DeltaTarget] = DeltaTarget) -> None:
        """A turn of the upkeep, with the cuts that are kept now; before it, rewritten files are committed."""
        target = kind.open(self.uri)
        assert target is not None
        self.sink.parts.rewriter.finish({self.uri: target}, wait=True)
        self.upkeep.turn(PublishedTable.open(published_uri(self.path), LOG).cuts, {self.uri: target})

    def files(self) -> set[str]:
        """Data files on the disk."""
        return {path.name for path in Path(self.uri).glob("*.parquet")}

    def needed(self, *versions: int) -> set[str]:
        """Data files of the kept cuts, of the newest version, and of these versions."""
        lake = Lake.open(self.path)
        kept = [lake.cut(Position(cut.position)).versions[self.uri] for cut in lake.cuts()]
        tables = [DeltaTable(self.uri), *(DeltaTable(self.uri, version=version) for version in (*kept, *versions))]
        return {Path(file).name for table in tables for file in table.file_uris()}

    def versions(self) -> set[int]:
        """Versions whose commits are on the disk."""
        return {int(path.stem) for path in Path(self.uri, "_delta_log").glob("*.json")}

    def live(self) -> int:
        """Files of the newest version."""
        target = DeltaTarget.open(self.uri)
        assert target is not None
        return target.files()[0]

    def items(self, version: int | None = None) -> dict[int, str]:
        """The rows."""
        rows = read_target(self.uri, version).read_all()
        return dict(zip(rows["id"].to_pylist(), rows["item"].to_pylist(), strict=True))

    def expected(self, rounds: int) -> dict[int, str]:
        """The rows after so many rounds."""
        return {1: str(rounds), **dict.fromkeys(range(2, rounds + 1), "x")}

    def assert_every_kept_cut_is_whole(self) -> int:
        """Each is read as it was; how many there are."""
        lake = Lake.open(self.path)
        cuts = lake.cuts()
        for cut in cuts:
            version = lake.cut(Position(cut.position)).versions[self.uri]
            assert self.items(version) == self.expected(cut.position // 10)
        return len(cuts)
