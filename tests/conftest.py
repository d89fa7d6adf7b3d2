"""Fixtures come from tests/fixtures, by subject."""

from hypothesis import settings

# the machine may be busy; how long an example takes says nothing of what it shows
settings.register_profile("cdc", deadline=None)
settings.load_profile("cdc")

pytest_plugins = ["tests.fixtures.postgres", "tests.fixtures.pipeline", "tests.fixtures.spark"]
