"""Change data capture for Postgres: the connector service."""

from pathlib import Path
from typing import Final

DEFAULT_CONFIG: Final = Path("config/shop.yaml")
"""The definition that a command reads if none is named."""
