"""Fixtures come from tests/fixtures, by subject."""

pytest_plugins = ["tests.fixtures.postgres", "tests.fixtures.pipeline", "tests.fixtures.spark"]
