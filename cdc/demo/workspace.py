"""Workspace of the demo: its state folder, its ports and its definition."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Final

from cdc.demo.shop_workload import script_text

FOLDER: Final = ".cdc-demo"
POSTGRES_PORT: Final = 54329
"""Port number in the name of the Postgres socket; set explicitly, so that the user's PGPORT does not apply."""
_HISTORY_PLACEHOLDER: Final = "# the demo adds the history sink here after the workload"
"""Comment in the definition file that the history sink replaces."""
DOCUMENTS, MARTS = "documents", "marts"
"""Names of the sinks of views."""
BACKLOG: Final = "backlog"
"""Name of the sink that Spark's executors fill."""
BACKLOG_PIPELINE: Final = "shop_executors"
"""Name of the pipeline in the definition of that sink, so that its apply process reports under a name of its own."""
_LAST_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class Workspace:
    """The state folder, which contains everything that the demo creates."""

    state: Path

    @property
    def postgres(self) -> Path:
        """Return the data folder of the embedded Postgres."""
        return self.state / "postgres"

    @property
    def log(self) -> Path:
        """Return the path of the change log."""
        return self.state / "log"

    @property
    def definition(self) -> Path:
        """Return the path of the definition that the processes run."""
        return self.state / "shop.yaml"

    @property
    def catalog_url(self) -> str:
        """Return the SQLAlchemy URL of the catalog."""
        return f"sqlite:///{self.state}/catalog.db"

    def add_history(self) -> None:
        """Add the history sink to the definition file."""
        values = {"state": str(self.state)}
        added = Template(script_text("history.yaml")).substitute(values).rstrip()
        self.definition.write_text(self.definition.read_text().replace(_HISTORY_PLACEHOLDER, added))

    def define_backlog(self) -> Path:
        """Write a definition with only the sink BACKLOG and `spark.engine: spark`; return its path.

        Its log is that of the workspace, under a path that exists after `offer_log`.
        """
        sink = Template(script_text("backlog.yaml")).substitute({"state": str(self.state)}).rstrip()
        head, _, rest = self.definition.read_text().partition("sinks:\n")
        _, _, tail = rest.partition("\nspark:\n")
        spark = script_text("backlog_spark.yaml")
        path = self.state / "executors.yaml"
        head = head.replace("name: shop\n", f"name: {BACKLOG_PIPELINE}\n", 1)
        head = head.replace(f'path: "{self.log}"', f'path: "{self._offered_log}"', 1)
        # the apply process of the demo compacts the log
        path.write_text(f"{head}  compact: {{every: off}}\nsinks:\n{sink}\nspark:\n{spark}{tail}")
        return path

    def offer_log(self) -> None:
        """Let the apply process of the sink BACKLOG find the log, for which it waits."""
        self._offered_log.symlink_to(self.log)

    @property
    def _offered_log(self) -> Path:
        return self.state / "offered_log"

    @property
    def _view_sinks(self) -> tuple[dict[str, Any], ...]:
        """The sinks of the views: documents of orders in a search index, and the revenue as a Delta table."""
        marts = f"{self.state}/marts/{{schema}}/{{table}}"
        return (
            {"name": DOCUMENTS, "type": "search", "path": f"{self.state}/documents", "views": ["shop.order_documents"]},
            {"name": MARTS, "type": "delta", "path": marts, "views": ["shop.revenue"]},
        )

    def output(self, process: str) -> Path:
        """Return the path of the file with the output of a child process."""
        return self.state / f"{process}.out"

    def define(
        self,
        dsn: str,
        port: int,
        jars: Sequence[str],
        search: Mapping[str, Any] | None = None,
        *,
        with_views: bool = False,
    ) -> None:
        """Write the definition file with the source's DSN, the page's port and the jars, without the history sink.

        search: the keys of the search sink that say where its index is; default a directory in the state folder.
        """
        values = {"dsn": dsn, "state": str(self.state), "port": str(port), "jars": json.dumps(list(jars))}
        keys = search or {"engine": "tantivy", "path": f"{self.state}/search"}
        values["search"] = json.dumps(keys).removeprefix("{").removesuffix("}")
        values["history"] = _HISTORY_PLACEHOLDER
        values["views"] = script_text("views.yaml") if with_views else ""
        values["view_sinks"] = "".join(f"\n  - {json.dumps(sink)}" for sink in self._view_sinks) if with_views else ""
        self.definition.write_text(Template(script_text("shop.yaml")).substitute(values))


@contextmanager
def open_workspace(folder: Path, *, keep: bool) -> Iterator[Workspace]:
    """Create a new state folder in `folder`; remove it at the end, unless `keep` is True."""
    state = _new_folder(folder)
    try:
        yield Workspace(state)
    finally:
        if not keep:
            shutil.rmtree(state, ignore_errors=True)


def free_port(wanted: int) -> int:
    """Return the wanted port of 127.0.0.1 if it is free, otherwise the next free port."""
    for port in range(wanted, _LAST_PORT + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"the demo found no free port on 127.0.0.1 from {wanted} to 65535")


def _new_folder(folder: Path) -> Path:
    number = 1
    while True:
        state = folder / (FOLDER if number == 1 else f"{FOLDER}-{number}")
        try:
            state.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        except OSError:
            return Path(tempfile.mkdtemp(prefix="cdc-demo-")).resolve()
        else:
            return state.resolve()
