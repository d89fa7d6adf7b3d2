"""Change data capture for Postgres: the connector service."""

from pathlib import Path
from typing import Final

DEFAULT_CONFIG: Final = Path("config/shop.yaml")
"""Definition file that a command reads if its options name no other file."""
