"""Search cluster of the demo: an OpenSearch cluster that `cdc demo --opensearch URL` fills instead of a local index.

The names of the demo's indexes begin with a random prefix, so the demo meets no other index, and removes only its own.
The definition has the password as a reference: a file in the demo's folder, or an environment variable.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from cdc.command_output import counted
from cdc.config import SearchSinkDefinition
from cdc.config.secret import Secret
from cdc.demo.pipeline_observer import SEARCH
from cdc.demo.terminal import Terminal
from cdc.errors import CdcError, InvalidDefinition
from cdc.targets.search_server.client import SearchClient
from cdc.targets.search_server.index_inventory import drop_index

ENGINE: Final = "opensearch"
PASSWORD_VARIABLE: Final = "OPENSEARCH_PASSWORD"  # noqa: S105 - the name of a variable
"""Environment variable with the password of a user whose password the URL does not contain."""
PASSWORD_FILE: Final = "search-password"  # noqa: S105 - the name of a file
"""File in the demo's folder with the password that the URL contains."""
RETRY_SECONDS: Final = 5.0
"""Seconds for which a request of the demo itself is sent again, if the cluster does not answer."""


@dataclass(frozen=True, slots=True)
class SearchCluster:
    """The cluster in which the demo has its search indexes."""

    url: str
    """URL without user and password."""
    user: str | None
    password: Secret | None
    is_password_in_url: bool
    """Whether the URL contained the password; otherwise the environment does."""
    prefix: str = field(default_factory=lambda: f"cdc-demo-{secrets.token_hex(4)}-")
    """Text with which the names of the demo's indexes begin."""

    @classmethod
    def of(cls, url: str, environment: Mapping[str, str]) -> SearchCluster:
        """Return the cluster at a URL, which may contain a user, or a user and a password.

        Raises InvalidDefinition if a definition could not contain this access, or if the password is missing.
        """
        try:
            parts = urlsplit(url)
            host = parts.netloc.rpartition("@")[2]
            user, password = unquote(parts.username or "") or None, unquote(parts.password or "") or None
        except ValueError:
            raise InvalidDefinition("the URL of --opensearch is not valid", remedy=_EXAMPLE) from None
        is_password_in_url = password is not None
        if user is not None and password is None:
            password = environment.get(PASSWORD_VARIABLE)
            if not password:
                raise InvalidDefinition(
                    f"the URL of --opensearch has the user {user!r} without a password",
                    remedy=f"set the environment variable {PASSWORD_VARIABLE}",
                )
        path = parts.path.rstrip("/")
        secret = None if password is None else Secret(password, f"${{{PASSWORD_VARIABLE}}}")
        cluster = cls(f"{parts.scheme}://{host}{path}", user, secret, is_password_in_url)
        cluster.sink()
        return cluster

    @property
    def shown(self) -> str:
        """Text for the terminal and the report: the engine, the URL, and the names of the indexes."""
        return f"{ENGINE} {self.url}/{self.prefix}*"

    def sink(self) -> SearchSinkDefinition:
        """Return the demo's search sink. Raises InvalidDefinition if the definition cannot contain the access."""
        keys = {"type": "search", "name": SEARCH, "engine": ENGINE, "server": self._server(self.password)}
        try:
            return SearchSinkDefinition.model_validate(keys)
        except ValidationError as exc:
            reasons = "; ".join(sorted({problem["msg"] for problem in exc.errors()}))
            raise InvalidDefinition(f"the URL of --opensearch is not usable: {reasons}", remedy=_EXAMPLE) from None

    def keys(self, state: Path) -> dict[str, Any]:
        """Return the keys `engine` and `server` of the sink for the definition file in the demo's folder.

        A password of the URL is written to a file in the folder, which only the user can read.
        """
        if not self.is_password_in_url or self.password is None:
            return {"engine": ENGINE, "server": self._server(f"${{{PASSWORD_VARIABLE}}}")}
        file = state / PASSWORD_FILE
        file.touch(mode=0o600)
        file.write_text(self.password.reveal(), encoding="utf-8")
        return {"engine": ENGINE, "server": self._server({"file": str(file)})}

    def check(self) -> None:
        """Raise the error of the connection if the cluster does not answer, refuses the login, or is unsupported."""
        with SearchClient(self.sink().access, ENGINE, retry_for=RETRY_SECONDS) as client:
            client.check()

    def remove(self) -> list[str]:
        """Remove all indexes of the demo, and return their names."""
        with SearchClient(self.sink().access, ENGINE, retry_for=RETRY_SECONDS) as client:
            names = sorted(client.ask("GET", f"/{self.prefix}*?expand_wildcards=all").body)
            for name in names:
                drop_index(client, name)
        return names

    def _server(self, password: Any) -> dict[str, Any]:
        login = {} if self.user is None else {"user": self.user, "password": password}
        return {"url": self.url, **login, "index": f"{self.prefix}{{schema}}.{{table}}"}


_EXAMPLE: Final = "write --opensearch https://USER@HOST:9200; http:// with a password is possible only on this machine"


@contextmanager
def search_cluster(cluster: SearchCluster | None, screen: Terminal, *, keep: bool) -> Iterator[None]:
    """Check that the cluster can be used; at the end remove the demo's indexes from it, unless `keep` is True.

    If they cannot be removed, print why, and how to remove them. Without a cluster, do nothing.
    """
    if cluster is None:
        yield
        return
    cluster.check()
    screen.done("search", f"{cluster.shown} ({'kept' if keep else 'removed on exit; keep with --keep'})")
    try:
        yield
    finally:
        if not keep:
            _remove(cluster, screen)


def _remove(cluster: SearchCluster, screen: Terminal) -> None:
    try:
        names = cluster.remove()
    except CdcError as error:
        remedy = f"to remove them: curl -X DELETE '{cluster.url}/{cluster.prefix}*'"
        screen.failed("search", f"indexes {cluster.prefix}* remain, {error.code} {error.message}   {remedy}")
        return
    screen.done("search", f"{counted(len(names), 'index')} removed from {cluster.url}")
