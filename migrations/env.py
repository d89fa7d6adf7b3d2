"""Alembic's entry point: migrates the catalog over a given connection; in offline mode only prints the SQL."""

from __future__ import annotations

from alembic import context
from sqlalchemy import make_url

from cdc.catalog.models import CatalogModel


def run() -> None:
    attributes = context.config.attributes
    if context.is_offline_mode():
        dialect = make_url(attributes["url"]).get_backend_name()
        context.configure(dialect_name=dialect, target_metadata=CatalogModel.metadata, literal_binds=True)
    else:
        context.configure(connection=attributes["connection"], target_metadata=CatalogModel.metadata)
    with context.begin_transaction():
        context.run_migrations()


run()
