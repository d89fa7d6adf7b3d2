"""EmbeddedPostgres: starts anywhere, for anyone, and leaves nothing behind."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cdc.errors import EmbeddedUnavailable
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres, find_binaries, is_reachable, server_account


def test_it_runs_in_a_folder_with_a_space_keeps_rows_over_a_crash_and_leaves_no_file_and_process(
    tmp_path: Path,
) -> None:
    home = tmp_path / "with a space"
    with EmbeddedPostgres(home) as server:
        pid, folders = server.pid, [server.data_directory, server.socket_directory]
        with connect(server.dsn()) as conn:
            assert conn.execute("SELECT current_setting('wal_level')").fetchone() == ("logical",)
            assert conn.info.server_version // 10000 == server.version
            conn.execute("CREATE TABLE t AS SELECT 1 AS id")
        port = server.port
        server.stop("immediate")
        assert server.pid is None
        server.start()

        assert server.port == port
        with connect(server.dsn()) as conn:
            assert conn.execute("SELECT id FROM t").fetchone() == (1,)
        pids = [pid, server.pid]

    for ended in pids:
        assert ended is not None
        with pytest.raises(ProcessLookupError):
            os.kill(ended, 0)
    assert not any(folder.exists() for folder in folders)
    assert not home.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to change to another account")
def test_as_root_it_runs_as_another_and_changes_no_folder_above(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    before = closed.stat()
    with EmbeddedPostgres(closed / "pg") as server:
        assert server.data_directory.stat().st_uid != 0
        assert not server.data_directory.is_relative_to(closed)
        outside = server.data_directory.parent

    assert (closed.stat().st_mode, closed.stat().st_uid) == (before.st_mode, before.st_uid)
    assert list(closed.iterdir()) == []
    assert not outside.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to change to another account")
def test_programs_out_of_reach_are_copied(tmp_path: Path) -> None:
    found = find_binaries(18)
    assert is_reachable(found / "postgres", server_account())
    closed = tmp_path / "closed" / "package" / "pginstall"
    (closed / "bin").mkdir(parents=True)
    (closed / "bin" / "postgres").write_text("#!/bin/sh\n")
    (tmp_path / "closed").chmod(0o700)
    with closing(EmbeddedPostgres(tmp_path / "pg")) as server:
        server._account = server_account()
        copied = server._reachable_binaries(closed / "bin")

        assert copied != closed / "bin"
        assert (copied / "postgres").read_text() == "#!/bin/sh\n"
        assert copied.stat().st_uid == server._account.uid  # type: ignore[union-attr]
    assert not copied.exists()


def test_a_version_that_is_not_here_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedUnavailable, match="no binaries of postgres 9"):
        EmbeddedPostgres(tmp_path / "pg", version=9).start()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [78, 79])
def test_it_starts_under_the_longest_path_that_has_room_for_a_socket_and_under_a_longer_one(length: int) -> None:
    with TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        folder = Path(base, "d" * (length - len(os.fsencode(base)) - 1))
        with EmbeddedPostgres(folder) as server, connect(server.dsn()) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
            assert server.data_directory.is_relative_to(folder) is (length == 78)
