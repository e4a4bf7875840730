# SPDX-License-Identifier: Apache-2.0
"""The engine's end of the stats socket: answers from the last snapshot, never from live state.

Threads and ownership. One daemon thread, `tierkv-stats`: the sockets and every client's buffers.
Crossing: `Publisher.last` and `Publisher.commands`, see there, and `_leave`, a pipe that `close`
writes to. No lock. Started by `start()`, ended by `close()`, which waits at most a second and may
be called twice. The scheduler thread never waits for it. If it dies, nobody can look, one log line
says so, and the engine goes on. A client that does not take its reply within a second is dropped.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierkv.stats import discovery
from tierkv.stats.protocol import COMMANDS, MAX_REQUEST, FrameError, Unpacker, pack
from tierkv.stats.publisher import Command, Publisher

logger = logging.getLogger(__name__)

MAX_CLIENTS = 32
MAX_LAST = 512
"""Requests in one reply."""
SEND_SECONDS = 1.0
COMMAND_SECONDS = 2.0
"""So long a command is waited for; then the engine is idle, and it comes before the next lookup."""
_TICK = 0.02
"""Seconds between two looks at commands that are under way."""


@dataclass(slots=True, eq=False)
class _Client:
    sock: socket.socket
    unpacker: Unpacker = field(default_factory=lambda: Unpacker(MAX_REQUEST))
    waits_for: Command | None = None
    until: float = 0.0


class StatsServer:
    """See the module.

    Args:
        publisher: what to tell.
        info: the answer to `info`: plain values.
        control: whether commands are taken.
    """

    def __init__(self, publisher: Publisher, info: dict[str, Any], control: bool) -> None:
        self.path: Path | None = None
        self._publisher = publisher
        self._info = {**info, "pid": os.getpid(), "control": control}
        self._control = control
        self._clients: list[_Client] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind and begin to answer.

        Raises:
            StatsError, OSError: there is no place for the socket.
        """
        self._server, self.path = discovery.bind(discovery.make_directory())
        self._server.setblocking(False)
        self._left, self._leave = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._left, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._main, name="tierkv-stats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the socket and end the thread."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        assert self.path is not None
        self.path.unlink(missing_ok=True)
        os.write(self._leave, b"x")
        thread.join(SEND_SECONDS)
        os.close(self._leave)

    def _main(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:
            logger.exception("the stats socket is closed; the engine goes on")
        finally:
            for client in list(self._clients):
                self._drop(client)
            self._selector.close()
            self._server.close()
            os.close(self._left)

    def _turn(self) -> bool:
        """Wait for something and deal with it; False once it is time to leave."""
        waiting = any(client.waits_for is not None for client in self._clients)
        for key, _ in self._selector.select(_TICK if waiting else None):
            if key.fileobj == self._left:
                return False
            if key.fileobj is self._server:
                self._accept()
            else:
                self._read(key.data)
        for client in list(self._clients):
            self._look_after(client)
        return True

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError:
            return
        if len(self._clients) >= MAX_CLIENTS or not _is_owner(sock):
            sock.close()
            return
        sock.settimeout(SEND_SECONDS)
        client = _Client(sock)
        self._clients.append(client)
        self._selector.register(sock, selectors.EVENT_READ, client)

    def _read(self, client: _Client) -> None:
        try:
            data = client.sock.recv(1 << 16)
            messages = client.unpacker.feed(data)
        except (OSError, FrameError):
            self._drop(client)
            return
        if not data:
            self._drop(client)
            return
        for message in messages:
            if client.waits_for is not None:
                self._drop(client)  # it does not wait for its reply
                return
            reply = self._answer(client, message)
            if reply is not None and not self._send(client, reply):
                return

    def _answer(self, client: _Client, message: dict[str, Any]) -> dict[str, Any] | None:
        op = message.pop("op", None)
        if op == "info":
            return {"ok": True, "result": self._info}
        last = self._publisher.last
        if op == "snapshot":
            if last is None:
                return _error("the engine has not run a step yet; ask again in a moment")
            return {
                "ok": True,
                "result": {"time": last.time, "idle": last.idle, "metrics": last.metrics},
            }
        if op == "requests":
            count = message.get("last", 20)
            if not isinstance(count, int) or not 0 < count <= MAX_LAST:
                return _error(f"last: must be 1 to {MAX_LAST}")
            records = last.requests[-count:] if last is not None else ()
            return {"ok": True, "result": [record.as_dict() for record in records]}
        if op in COMMANDS:
            if not self._control:
                return _error(
                    "this engine's socket is read-only; put 'stats: {control: true}' into its "
                    "configuration and restart it"
                )
            client.waits_for = Command(str(op), message)
            client.until = time.monotonic() + COMMAND_SECONDS
            self._publisher.commands.put(client.waits_for)
            return None
        return _error(f"unknown request {str(op)[:40]!r}; this engine and this tierkv differ")

    def _look_after(self, client: _Client) -> None:
        """Reply to a command that is done, or will be before anything else is."""
        command = client.waits_for
        if command is None:
            return
        reply = command.answer
        if reply is None and time.monotonic() >= client.until:
            reply = {"ok": True, "result": {"queued": True}}
        if reply is not None:
            client.waits_for = None
            self._send(client, reply)

    def _send(self, client: _Client, reply: dict[str, Any]) -> bool:
        try:
            client.sock.sendall(pack(reply))
        except OSError:
            self._drop(client)
            return False
        return True

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._selector.unregister(client.sock)
            client.sock.close()


def _error(text: str) -> dict[str, Any]:
    return {"ok": False, "error": text}


def _is_owner(sock: socket.socket) -> bool:
    """Whether the other end is this user, or root. The directory's mode says so already."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid in (os.getuid(), 0)
