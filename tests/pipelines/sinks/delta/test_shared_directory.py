"""The directory of a target that executors and driver do not share, or not under one account, is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from pyspark.sql import SparkSession

from cdc.errors import ExecutorFilesUnusable
from pipelines.runtime.spark_session import is_local
from pipelines.sinks.delta.shared_directory import SharedDirectories, check_probes, executors_of, write_probe
from tests.fixtures.private import under_umask

NOBODY = 65534


@pytest.fixture(name="target")
def _target() -> Iterator[Path]:
    """A directory that every account can write; those of pytest are private."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def as_another_account(check: Callable[[], None]) -> str:
    """Run a check in a process of another account; return the error of ours that it raises, as text.

    An account without privileges is another one already, if the modes leave nothing to the owner of a file.
    """
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        said = "no error"
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setuid(NOBODY)
            check()
        except ExecutorFilesUnusable as exc:
            said = f"{exc.message}\n{exc.fix}"
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def test_a_file_that_the_umask_of_an_executor_closes_to_the_driver_is_refused_before_a_commit_names_it(
    target: Path,
) -> None:
    with under_umask(0o022):
        readable = write_probe(str(target))
    assert as_another_account(lambda: check_probes(str(target), [readable])) == "no error"

    with under_umask(0o777 if os.geteuid() else 0o077):
        probe = write_probe(str(target))
    text = as_another_account(lambda: check_probes(str(target), [probe]))
    assert text.startswith(f"the driver may not read file '{probe.name}', which the executor on '{probe.host}' wrote")
    assert f"its owner {os.geteuid()}" in text
    assert "one account" in text.splitlines()[1]


def test_a_directory_that_each_machine_has_by_itself_is_refused(target: Path) -> None:
    here, elsewhere = write_probe(str(target)), replace(write_probe(str(target)), host="worker-2")
    (target / elsewhere.name).unlink()
    with pytest.raises(ExecutorFilesUnusable, match=r"executor on 'worker-2' .* does not see it") as refused:
        check_probes(str(target), [here, elsewhere])
    assert "object store" in refused.value.fix
    assert not list(target.iterdir())

    missing = write_probe(f"{target}/missing")
    with pytest.raises(ExecutorFilesUnusable, match=r"cannot write into '.*missing': no such file or directory"):
        check_probes(f"{target}/missing", [missing])


def test_on_one_machine_nothing_is_probed(spark: SparkSession, tmp_path: Path) -> None:
    assert is_local(spark.sparkContext.master)
    assert executors_of(spark)
    SharedDirectories().check(spark, f"{tmp_path}/missing")
