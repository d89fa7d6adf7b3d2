"""An object store that answers late, wrongly or not at all: no commit is lost, made twice, or taken for another's."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from threading import Event, Thread

import pytest

from cdc.bucket_files import BucketPath
from cdc.capture.startup_checks import storage_problems
from cdc.config import Definition, load_definition
from cdc.errors import LogFenced, LogInaccessible, LogUnreachable
from cdc.log.reader import LogReader
from cdc.log.retrying_writer import RetryingWriter
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.fixtures.s3 import KEY, S3, Relay
from tests.fixtures.waiting import until
from tests.log.rows import IDENTITY, LIMITS
from tests.log.simple_compaction import open_compactor, read_range
from tests.log.table_writers import APPENDS, BOTH, COMPACTS, TableWriter, append_transaction, log_positions

COMMIT, DATA = APPENDS.commit, APPENDS.file
TableInBucket = tuple[TableWriter, BucketPath]


@pytest.fixture(name="root")
def _root(s3: S3, relay: Relay) -> BucketPath:
    """A log with one transaction, reached through the relay."""
    root = s3.root(port=relay.port)
    append_transaction(LogWriter.open(root, IDENTITY, LIMITS), 10)
    return root


def patient(root: BucketPath, stop: Event | None = None) -> tuple[RetryingWriter, list[bool]]:
    blocked: list[bool] = []
    return RetryingWriter(root, LIMITS, stop or Event(), blocked.append), blocked


@pytest.fixture(name="both", params=BOTH, ids=lambda of: of.name)
def _both(request: pytest.FixtureRequest, s3: S3, relay: Relay) -> TableInBucket:
    """One table after the other, and a log of which it holds one transaction, reached through the relay."""
    of: TableWriter = request.param
    root = s3.root(port=relay.port)
    of.create(root)
    return of, root


def commits(relay: Relay, commit: str = COMMIT) -> list[str]:
    return [request for request in relay.seen if re.search(commit, request)]


def test_a_commit_whose_answer_is_lost_or_wrong_is_made_once_and_recognised(both: TableInBucket, relay: Relay) -> None:
    """Each commit asks for its file to be new, and the next one meets no fault."""
    of, root = both
    step = of.writer(root)
    lost = relay.fault(of.commit)
    step(20)
    # the store keeps the commit, its gate says 500, and the client comes again by itself
    gate = relay.fault(of.commit, 500)
    gate.kept = True
    step(30)
    # the store says that the commit is there, and it is not
    refused = relay.fault(of.commit, 412)
    step(40)
    met = len(commits(relay, of.commit))
    step(50)

    assert (lost.done, gate.done, refused.done) == (1, 1, 1)
    made = commits(relay, of.commit)
    assert len(made) == met + 1
    assert [request for request in relay.conditional if re.search(of.commit, request)] == made
    assert of.positions(root) == sorted([10, 20, 30, 40, 50] * 2)


@pytest.mark.slow
def test_who_cannot_know_whether_it_committed_looks_again_until_it_does(root: BucketPath, relay: Relay) -> None:
    writer, blocked = patient(root)
    lost, away = relay.fault(COMMIT), relay.fault(r"^(GET|HEAD) .*/0*2\.json", 503, times=12)
    append_transaction(writer, 20)
    append_transaction(writer, 30)

    assert (lost.done, away.done) == (1, 12)
    assert blocked == [True, False]
    assert len(commits(relay)) >= 4
    assert log_positions(root) == [10, 10, 20, 20, 30, 30]


def test_a_compaction_that_cannot_know_whether_it_committed_fails_and_the_next_one_goes_on_behind_it(
    s3: S3, relay: Relay
) -> None:
    root = s3.root(port=relay.port)
    COMPACTS.create(root)
    step = COMPACTS.writer(root)
    lost, away = (
        relay.fault(COMPACTS.commit),
        relay.fault(r"^(GET|HEAD) .*/compacted/_delta_log/0*2\.json", 503, times=99),
    )
    with pytest.raises(LogUnreachable):
        step(20)
    assert (lost.done, away.done > 0) == (1, True)
    relay.faults.clear()

    assert open_compactor(root).horizon == 20
    COMPACTS.writer(root)(30)
    assert COMPACTS.positions(root) == [10, 10, 20, 20, 30, 30]


def test_a_writer_whose_answer_was_lost_is_fenced_by_who_took_over(both: TableInBucket, relay: Relay, s3: S3) -> None:
    of, root = both
    stopped = of.writer(root)
    of.writer(s3.root(root.bucket.removeprefix("s3://")))(20)
    relay.fault(of.commit)
    with pytest.raises(LogFenced):
        stopped(20)

    assert of.positions(root) == [10, 10, 20, 20]


def test_a_store_that_is_busy_for_long_is_waited_for(root: BucketPath, relay: Relay) -> None:
    position = 10
    for what, status in product((DATA, COMMIT), (500, 503)):
        writer, blocked = patient(root)
        busy = relay.fault(what, status, times=5)  # more than one request is tried
        append_transaction(writer, position := position + 10)

        assert busy.done == 5, (what, status)
        assert blocked == [True, False], (what, status)
    assert log_positions(root) == sorted([10, 20, 30, 40, 50] * 2)


@pytest.mark.parametrize("status", [pytest.param(500, marks=pytest.mark.slow), 503])
def test_a_compaction_that_meets_a_busy_store_fails_and_the_next_one_makes_it(
    s3: S3, relay: Relay, status: int
) -> None:
    root = s3.root(port=relay.port)
    COMPACTS.create(root)
    for what, position in ((COMPACTS.file, 20), (COMPACTS.commit, 30)):
        busy = relay.fault(what, status, times=5)  # more than one request is tried
        with pytest.raises(LogUnreachable):
            COMPACTS.writer(root)(position)
        COMPACTS.writer(root)(position)

        assert busy.done == 5, what
    assert COMPACTS.positions(root) == [10, 10, 20, 20, 30, 30]


@pytest.mark.slow
@pytest.mark.parametrize("what", [COMPACTS.file, COMPACTS.commit], ids=["data", "commit"])
def test_a_compaction_that_is_refused_says_what_to_do_and_changes_nothing(s3: S3, relay: Relay, what: str) -> None:
    root = s3.root(port=relay.port)
    COMPACTS.create(root)
    relay.fault(what, 403)
    with pytest.raises(LogInaccessible, match=r"denies access to bucket 's3://lake-.*'") as refused:
        COMPACTS.writer(root)(20)

    assert "log.storage" in refused.value.fix
    assert COMPACTS.positions(root) == [10, 10]


def test_a_refusal_is_told_with_what_to_do_and_nothing_waits(root: BucketPath, relay: Relay) -> None:
    writer, blocked = patient(root)
    relay.fault(DATA, 403)
    with pytest.raises(LogInaccessible, match=r"denies access to bucket 's3://lake-.*'") as refused:
        append_transaction(writer, 20)

    assert "log.storage" in refused.value.fix
    assert blocked == []


def test_a_bucket_that_does_not_exist_is_told(s3: S3) -> None:
    missing = s3.root("nobody-made-this")
    with pytest.raises(LogInaccessible, match="bucket 's3://nobody-made-this' does not exist"):
        LogReader(missing)
    with pytest.raises(LogInaccessible, match="does not exist"):
        LogWriter.open(missing, IDENTITY, LIMITS)


@pytest.fixture(name="definition")
def _definition(root: BucketPath, tmp_path: Path) -> Definition:
    """Of a pipeline whose log is reached through the relay."""
    endpoint = dict(root.options)["aws_endpoint"]
    (tmp_path / "shop.yaml").write_text(
        "version: 1\nname: shop\nsource: {dsn: 'host=127.0.0.1 dbname=shop user=cdc'}\ntables: [{match: shop.*}]\n"
        f"log: {{path: '{root}', storage: {{endpoint: '{endpoint}', allow_http: true, "
        "region: us-east-1, access_key_id: lab, secret_access_key: '${KEY}'}}\n"
        f"catalog: {{url: 'sqlite:///{tmp_path}/catalog.db'}}\n"
    )
    return load_definition(tmp_path / "shop.yaml", {"KEY": KEY})


def test_a_store_that_can_be_used_has_no_problem(definition: Definition, relay: Relay) -> None:
    assert storage_problems(definition) == []
    assert [place.name for place in definition.log.root.iterdir()] == ["changes"]  # the probe is gone
    assert relay.seen


@pytest.mark.parametrize(
    ("pattern", "status", "message"),
    [("^PUT .*_probe-", 403, "denies access"), ("^POST .*delete", 403, "denies access"), (".", 503, "does not answer")],
)
def test_what_a_store_does_not_allow_is_a_problem_with_what_to_do(
    definition: Definition, relay: Relay, pattern: str, status: int, message: str
) -> None:
    relay.fault(pattern, status, times=1000)
    (problem,) = storage_problems(definition)

    assert message in problem.message
    assert "log.storage" in problem.message or "log.path" in problem.message
    assert problem.fatal


def test_a_store_that_cannot_tell_two_writers_apart_is_a_problem(definition: Definition, relay: Relay) -> None:
    relay.ignored.add("if-none-match")
    (problem,) = storage_problems(definition)

    assert "If-None-Match" in problem.message


def test_no_key_is_told_in_an_error_or_a_repr(s3: S3, relay: Relay) -> None:
    root = s3.root(port=relay.port, key="top-secret-key")
    relay.fault(".", 403, times=1000)
    with pytest.raises(LogInaccessible) as refused:
        LogReader(root)
    said = [repr(root), str(root), str(refused.value), repr(refused.value), str(refused.value.__cause__)]

    assert not [text for text in said if "top-secret-key" in text]


def test_a_reader_of_a_store_that_does_not_answer_is_told_so(root: BucketPath, relay: Relay) -> None:
    log = LogReader(root)
    relay.fault(".", 503, times=1000)
    with pytest.raises(LogUnreachable):
        read_range(log, Position(0), Position(10))


def test_waiting_ends_when_it_is_asked_to(root: BucketPath, relay: Relay) -> None:
    stop, raised = Event(), list[BaseException]()
    writer, blocked = patient(root, stop)
    relay.fault(".", 503, times=1000)

    def run() -> None:
        try:
            append_transaction(writer, 20)
        except Exception as exc:
            raised.append(exc)

    thread = Thread(target=run)
    thread.start()
    until(lambda: blocked, "the writer to wait")
    stop.set()
    thread.join(60)

    assert not thread.is_alive()
    assert [type(exc).__name__ for exc in raised] == ["LogUnwritable"]
