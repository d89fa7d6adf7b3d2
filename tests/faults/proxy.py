"""Proxy: a TCP relay in threads of the test's own process that misbehaves on demand, as networks do."""

from __future__ import annotations

import re
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Final, Self

TICK: Final = 0.02
"""Seconds between looks at what the test wants."""
WHOLE: Final = 1 << 16
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER that makes close() send RST."""


class Proxy:
    """Listens on 127.0.0.1 and relays to a port of it; a context manager. Its faults may be set at any time."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._links: list[_Link] = []
        self._lock = Lock()
        self._listener: socket.socket | None = None
        self._accepting: Thread | None = None
        self.port = 0
        self.piece = WHOLE
        """Bytes that are passed on at once."""
        self.latency = 0.0
        """Seconds that each piece waits."""
        self.frozen = Event()
        """While set nothing is read, in neither direction, and the sockets stay."""
        self.deaf = Event()
        """While set everything is read and thrown away."""
        self.stalled = Event()
        """Set by itself when `left` is used up: nothing more goes to the clients."""
        self.left: int | None = None
        """Bytes that may still go to the clients; None is any number."""
        self.rewriter: Callable[[], Callable[[bytes], bytes]] | None = None
        """Makes for each connection what everything that goes to its client is passed through."""
        self.passed = 0
        """Bytes that went to the clients."""

    def dsn(self, dsn: str) -> str:
        """The same database through here."""
        return re.sub(r"@127\.0\.0\.1:\d+/", f"@127.0.0.1:{self.port}/", dsn)

    @property
    def links(self) -> int:
        """Connections that are relayed now."""
        with self._lock:
            return sum(link.is_open for link in self._links)

    def up(self) -> None:
        """Listen, at the port of before if there was one."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._listener.settimeout(TICK)
        self.port = self._listener.getsockname()[1]
        self._accepting = Thread(target=self._accept, args=[self._listener], daemon=True)
        self._accepting.start()

    def down(self) -> None:
        """The port is closed, and so are its connections."""
        listener, self._listener = self._listener, None
        if listener is not None and self._accepting is not None:
            self._accepting.join()
            listener.close()
        self.reset()

    def reset(self) -> None:
        """Every connection ends with RST, on both sides."""
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            link.reset()

    def heal(self) -> None:
        """No fault any more for what is to come; a connection that lost bytes stays as it is."""
        self.piece, self.latency, self.left = WHOLE, 0.0, None
        for fault in (self.frozen, self.deaf, self.stalled):
            fault.clear()

    def granted(self, wanted: int) -> int:
        """How many bytes may go to a client now."""
        with self._lock:
            allowed = wanted if self.left is None else min(wanted, self.left)
            self.passed += allowed
            if self.left is not None:
                self.left -= allowed
                if self.left == 0:
                    self.stalled.set()
            return allowed

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            with suppress(TimeoutError):
                client, _ = listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                with self._lock:
                    self._links.append(_Link(self, client, server))


class _Link:
    """One connection and its other half; a thread for each direction, the last of which closes both."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._rewrite = proxy.rewriter() if proxy.rewriter else None
        self._over, self._abrupt = Event(), False
        self._lock, self._running = Lock(), 2
        self._ends = (client, server)
        for end in self._ends:
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pumps = (Thread(target=self._pump, args=[client, server]), Thread(target=self._pump, args=[server, client]))
        self._pumps = pumps
        for pump in pumps:
            pump.daemon = True
            pump.start()

    @property
    def is_open(self) -> bool:
        return not self._over.is_set()

    def reset(self) -> None:
        self._abrupt = True
        self._over.set()
        for pump in self._pumps:
            pump.join()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        to_client = sink is self._ends[0]
        with suppress(OSError):
            while not self._over.is_set():
                if self._proxy.frozen.is_set() or (to_client and self._proxy.stalled.is_set()):
                    self._over.wait(TICK)
                elif select.select([source], [], [], TICK)[0]:
                    piece = source.recv(self._proxy.piece)
                    if not piece and not self._proxy.deaf.is_set():
                        break
                    if not piece:  # an end is not passed on either
                        self._over.wait()
                    if to_client and self._rewrite:
                        piece = self._rewrite(piece)
                    self._pass(piece, sink, to_client=to_client)
        self._end()

    def _pass(self, piece: bytes, sink: socket.socket, *, to_client: bool) -> None:
        if self._proxy.latency:
            self._over.wait(self._proxy.latency)
        if self._proxy.deaf.is_set():
            return
        view = memoryview(piece)[: self._proxy.granted(len(piece)) if to_client else len(piece)]
        while view and not self._over.is_set():
            if select.select([], [sink], [], TICK)[1]:
                view = view[sink.send(view) :]

    def _end(self) -> None:
        self._over.set()
        with self._lock:
            self._running -= 1
            if self._running:
                return
        for end in self._ends:
            with suppress(OSError):
                if self._abrupt:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.close()
