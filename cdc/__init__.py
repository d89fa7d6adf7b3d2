"""Change data capture from Postgres: capture, change log, catalog, service and commands, without any Spark code."""

from pathlib import Path
from typing import Final

DEFAULT_CONFIG: Final = Path("config/shop.yaml")
"""Path of the definition file that a command reads if its options name no other file."""
