"""Whatever bytes come, both decoders answer alike, and with no other error than those they document.

Runs for CDC_FUZZ_SECONDS (default 3) per test; a failure prints the seed, and CDC_FUZZ_SEED replays it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pyarrow as pa

from cdc.config.source import Undecodable
from cdc.errors import MalformedFrame, UnknownRelation
from cdc.lsn import Lsn
from cdc.pgoutput.columnar_decoder import ColumnarDecoder
from cdc.pgoutput.copy_decoder import CopyDecoder
from cdc.pgoutput.decoder_events import DecodedRows
from cdc.pgoutput.message_parser import FrameBatch, parse_frame
from cdc.pgoutput.messages import UNCHANGED as NOT_SENT
from cdc.pgoutput.messages import (
    Delete,
    Insert,
    Keepalive,
    Message,
    OldKind,
    OldTuple,
    OriginMessage,
    Truncate,
    Type,
    Update,
)
from cdc.pgoutput.reference_decoder import ReferenceDecoder
from cdc.position import Position
from cdc.postgres.sql_ascii import CopyTextRepair, FrameTextRepair
from tests.pgoutput.encode import POSTGRES_EPOCH, frame
from tests.pgoutput.streams import FULL, ORDERS, Decoder, events, ready, relation, rows, transaction

SECONDS = float(os.environ.get("CDC_FUZZ_SECONDS", "3"))
SEED = int(os.environ.get("CDC_FUZZ_SEED", random.SystemRandom().randrange(2**32)))
LEAST = 20
EDGES = tuple(n.to_bytes(4, "big") for n in (0, 1, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1))
CORPUS = [
    frame(message)
    for message in [
        *transaction(600, relation(ORDERS), Insert(1, ("k", None, "ü")), Update(1, None, ("k", NOT_SENT, "x" * 200))),
        *transaction(
            700,
            relation(FULL),
            Update(2, OldTuple(OldKind.ROW, ("a", "b", "c")), ("a", NOT_SENT, NOT_SENT)),
            Delete(2, OldTuple(OldKind.ROW, ("a", "b", None))),
            Truncate((1, 2), True, False),
            Message(True, Lsn(5), "audit", b"\0\1", POSTGRES_EPOCH),
            OriginMessage(Lsn(1), "other"),
            Type(77, "shop", "mood"),
        ),
        Message(False, Lsn(900), "audit", b"x", POSTGRES_EPOCH),
        Keepalive(Lsn(950), True),
    ]
]
COPY = "1\t2\t3\n\\N\ta\\tb\\\\c\té\n\t\t\n".encode()


def tries() -> Iterator[tuple[random.Random, str]]:
    """A generator of chance for each try until the time is up, and how to get it again.

    A first try may compile a kernel for longer than all of the time; so many are made in any case.
    """
    deadline, number = time.monotonic() + SECONDS, 0
    while number < LEAST or time.monotonic() < deadline:
        yield random.Random(SEED + number), f"replay with CDC_FUZZ_SEED={SEED + number}"
        number += 1


def damaged(chance: random.Random, frames: list[bytes]) -> list[bytes]:
    """The frames after up to four accidents."""
    frames = list(frames)
    for _ in range(chance.randint(0, 4)):
        at = chance.randrange(len(frames))
        one, place = frames[at], chance.randrange(len(frames[at]) + 1)
        frames[at] = chance.choice(
            [
                one[:place] + chance.randbytes(1) + one[place + 1 :],
                one[:place],
                one[:place] + chance.randbytes(chance.randint(1, 9)) + one[place:],
                one[:place] + one[place + chance.randint(1, 9) :],
                one[:place] + chance.choice(EDGES) + one[place + 4 :],
                one[:place] + chance.choice(frames)[place:],
                chance.choice(frames),
            ]
        )
    return frames


def outcome(decoder: Decoder, frames: list[bytes]) -> list[object]:
    """What came, and the error that ended it; only the documented ones are caught."""
    found: list[object] = []
    try:
        for event in events(decoder, frames):
            if isinstance(event, DecodedRows):
                table = rows([event])
                times = table["committed_at"].cast(pa.int64())
                plain = table.set_column(table.schema.get_field_index("committed_at"), "committed_at", times)
                found.append((plain.to_pydict(), event.complete, event.last))
            else:
                found.append(event)
    except (MalformedFrame, UnknownRelation) as error:
        found.append((type(error), str(error)))
    return found


def test_both_decoders_answer_damaged_streams_alike_and_only_with_documented_errors():
    for chance, replay in tries():
        frames = damaged(chance, CORPUS)
        plain, columnar = ready(ReferenceDecoder()), ready(ColumnarDecoder())
        assert outcome(columnar, frames) == outcome(plain, frames), replay


def test_the_parser_knows_one_error():
    for chance, replay in tries():
        for one in damaged(chance, CORPUS):
            try:
                parse_frame(one)
            except MalformedFrame:
                continue
            except Exception as error:
                raise AssertionError(replay) from error


def test_every_damaged_stream_is_decodable_or_malformed_after_text_repair():
    for chance, replay in tries():
        frames = damaged(chance, CORPUS)
        mended = FrameTextRepair(Undecodable.REPLACE, Position(0))(FrameBatch.of(frames))
        assert len(mended) == len(frames), replay
        assert outcome(ready(ColumnarDecoder()), list(mended)) == outcome(ready(ReferenceDecoder()), list(mended)), (
            replay
        )


def test_a_copy_knows_one_error():
    for chance, replay in tries():
        (lines,) = damaged(chance, [COPY])
        copy = CopyDecoder(ORDERS, position=Position(1), xid=0, committed_at=0, first_ordinal=0)
        try:
            for chunk in (lines, CopyTextRepair(Undecodable.BASE64, ORDERS)(lines)):
                if (batch := copy.feed(chunk)) is not None:
                    batch.validate(full=True)
        except MalformedFrame:
            continue
        except Exception as error:
            raise AssertionError(replay) from error
