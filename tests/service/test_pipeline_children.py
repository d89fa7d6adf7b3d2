"""The processes of a pipeline, and the warm process that has their modules."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from cdc.service.pipeline_children import IMPORTS, pipeline_children, warm_process
from cdc.service.warm_process import ONE_THREAD


def test_a_pipeline_has_three_processes_and_only_the_asked_ones_are_started() -> None:
    assert [child.name for child in pipeline_children("shop.yaml")] == ["apply", "reader", "server"]
    assert [child.name for child in pipeline_children("shop.yaml", ["reader", "server"])] == ["reader", "server"]
    assert [child.name for child in pipeline_children("shop.yaml", copies_only=True) if child.may_end] == ["reader"]


def test_a_pipeline_with_deliveries_has_a_process_for_them() -> None:
    names = [child.name for child in pipeline_children("shop.yaml", delivers=True)]
    assert sorted(names) == ["apply", "deliver", "reader", "server"]
    assert [child.name for child in pipeline_children("shop.yaml", ["deliver"])] == ["deliver"]


def test_every_module_that_is_imported_before_the_fork_exists() -> None:
    """The warm process leaves a failed import to its child, so a renamed module would only cost time."""
    for entry in {entry for entries in IMPORTS.values() for entry in entries}:
        module, _, function = entry.partition(":")
        assert not function or callable(getattr(import_module(module), function)), entry
        import_module(module)


def test_a_single_process_has_no_warm_process() -> None:
    with warm_process(["reader"]) as none, warm_process(["reader", "reader"]) as none_again:
        assert (none, none_again) == (None, None)


def test_the_warm_process_has_one_thread_after_all_imports_of_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a lock that another thread owns during a fork would stay locked in the child."""
    for name in ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    code = "from tests.service.threads_before_fork import counted; print(*map(len, counted))"
    every = [entry for entries in IMPORTS.values() for entry in entries]
    with warm_process() as warm:
        assert warm is not None
        count = "tests.service.threads_before_fork:count_before_forks"
        process = warm.fork((sys.executable, "-u", "-m", "tests.run_code", code), [*every, count])
        assert process.wait() == 0

        assert process.stdout.read().decode() == "1\n"
