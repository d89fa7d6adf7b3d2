"""Pauses of deliveries and views.

A pause is a command that stays pending until somebody resumes, so it survives a restart of the process.
"""

from __future__ import annotations

from dataclasses import dataclass

from cdc.catalog import Catalog, Command


@dataclass(frozen=True, slots=True)
class PauseRequests:
    """Requests to pause and resume things of one kind."""

    kind: str
    """Kind of the command that pauses something while it is pending."""
    subject: str
    """Key of the name in the command's payload, and first word of the lines in the audit log."""

    def paused(self, catalog: Catalog, pipeline: str) -> frozenset[str]:
        """Return the names of what is paused at present."""
        return frozenset(command.payload[self.subject] for command in catalog.commands.pending(pipeline, self.kind))

    def pause(self, catalog: Catalog, pipeline: str, name: str, actor: str) -> bool:
        """Pause something; return False if it is paused already."""
        if self._command(catalog, pipeline, name) is not None:
            return False
        catalog.commands.post(pipeline, self.kind, {self.subject: name})
        catalog.audit.write(actor, f"{self.subject} pause", pipeline, {self.subject: name})
        return True

    def resume(self, catalog: Catalog, pipeline: str, name: str, actor: str) -> bool:
        """Let something that is paused continue; return False if it is not paused."""
        command = self._command(catalog, pipeline, name)
        if command is None:
            return False
        catalog.commands.finish(command.id, {})
        catalog.audit.write(actor, f"{self.subject} resume", pipeline, {self.subject: name})
        return True

    def _command(self, catalog: Catalog, pipeline: str, name: str) -> Command | None:
        pending = catalog.commands.pending(pipeline, self.kind)
        return next((command for command in pending if command.payload[self.subject] == name), None)
