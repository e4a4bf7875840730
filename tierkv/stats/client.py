# SPDX-License-Identifier: Apache-2.0
"""The looking end of a stats socket: find engines, ask them.

    for engine in engines():
        print(engine.info["model"], request(engine, "snapshot")["time"])

Blocking, with a timeout; one thread at a time.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.stats import discovery
from tierkv.stats.protocol import MAX_REPLY, FrameError, StatsError, Unpacker, pack

TIMEOUT = 5.0
"""Seconds for one request; longer than a server waits for a command."""

HOW_TO_START = """\
no running engine of this user was found (one that TierKV stands aside from is none: see its log). \
Start one with TierKV:
  vllm serve MODEL --kv-transfer-config '{"kv_connector": "TierKVConnector", "kv_role": "kv_both"}'\
"""


@dataclass(slots=True, eq=False)
class Engine:
    """A connection to one engine. `close` it.

    Attributes:
        path: of its socket.
        info: its answer to `info`.
    """

    path: Path
    info: dict[str, Any]
    _sock: socket.socket

    def request(self, op: str, **arguments: Any) -> Any:
        """Ask one thing.

        Raises:
            StatsError: the engine said no, or is gone.
        """
        return _ask(self._sock, self.path, op, arguments)

    def close(self) -> None:
        self._sock.close()


def connect(path: Path) -> Engine:
    """Connect to the engine behind a socket.

    Raises:
        StatsError: nobody answers.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(TIMEOUT)
    try:
        sock.connect(str(path))
        return Engine(path, _ask(sock, path, "info", {}), sock)
    except OSError as error:
        sock.close()
        raise StatsError(f"{path}: no answer ({error}); is the engine still running?") from None
    except StatsError:
        sock.close()
        raise


def engines() -> list[Engine]:
    """The running engines of this user, in the order of their pids; not those that hang."""
    found = []
    for path in discovery.find():
        try:
            found.append(connect(path))
        except StatsError:
            continue
    return found


def only_engine(pid: int | None = None, otherwise: str = "") -> Engine:
    """The one engine of this user, or the one of this process.

    Args:
        otherwise: what else may be done where there is none.

    Raises:
        StatsError: there is none, or there are several and none was named.
    """
    found = engines()
    chosen = [engine for engine in found if pid in (None, engine.info["pid"])]
    for engine in found:
        if engine not in chosen or len(chosen) > 1:
            engine.close()
    if not found:
        raise StatsError(HOW_TO_START + otherwise)
    known = ", ".join(f"{engine.info['pid']} ({engine.info['model']})" for engine in found)
    if not chosen:
        raise StatsError(f"no engine has the pid {pid}; running: {known}")
    if len(chosen) > 1:
        raise StatsError(f"several engines are running; choose one with --pid: {known}")
    return chosen[0]


def request(engine: Engine, op: str, **arguments: Any) -> Any:
    """`engine.request`, as a function.

    Raises:
        StatsError: the engine said no, or is gone.
    """
    return engine.request(op, **arguments)


def _ask(sock: socket.socket, path: Path, op: str, arguments: dict[str, Any]) -> Any:
    unpacker = Unpacker(MAX_REPLY)
    try:
        sock.sendall(pack({"op": op, **arguments}))
        replies: list[dict[str, Any]] = []
        while not replies:
            data = sock.recv(1 << 20)
            if not data:
                raise StatsError(f"{path}: hung up; is the engine still running?")
            replies = unpacker.feed(data)
    except (OSError, FrameError) as error:
        raise StatsError(f"{path}: no answer ({error}); is the engine still running?") from None
    reply = replies[0]
    if not reply.get("ok"):
        raise StatsError(f"engine {discovery.pid_of(path)}: {reply.get('error', 'said no')}")
    return reply["result"]
