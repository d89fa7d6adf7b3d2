"""A process that sends the whole log of a definition to its first delivery, as `cdc deliver` does.

It prints a JSON object with events, seconds and memory. The caller refuses pandas before these imports, as the command
does.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from cdc import metrics
from cdc.allocators import use_system_allocators
from cdc.config import load_definition
from cdc.delivery.delivery_figures import DeliveryFigures
from cdc.delivery.opened_delivery import opened_delivery
from cdc.garbage import collect_garbage_rarely
from cdc.log.reader import LogReader


def main(definition_file: Path) -> None:
    """Send, and print what was measured."""
    use_system_allocators(client_threads=True)
    collect_garbage_rarely()
    definition = load_definition(definition_file)
    settings = definition.deliveries[0]
    figures = DeliveryFigures(definition.name, settings.name, own := metrics.Metrics())
    began = time.perf_counter()
    with opened_delivery(definition, settings, LogReader(definition.log.root), figures) as opened:
        while opened.loop.step():
            pass
    seconds = time.perf_counter() - began
    events = own.value(metrics.DELIVERY_EVENTS, definition.name, settings.name)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    # ru_maxrss counts the process that started this one, too
    memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024
    print(json.dumps({"events": events, "seconds": seconds, "mib": memory}))
