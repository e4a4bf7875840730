# SPDX-License-Identifier: Apache-2.0
"""Opens the stats socket of one engine, and keeps what it tells up to date.

Threads. Everything here is called on vLLM's scheduler thread and never waits for the server's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from tierkv.keys import Namespace
from tierkv.stats.protocol import VERSION, StatsError
from tierkv.stats.publisher import Publisher
from tierkv.stats.server import StatsServer
from tierkv.store import Store
from tierkv.telemetry.build import build_labels
from tierkv_vllm.control import Control

if TYPE_CHECKING:
    from tierkv.telemetry.requests import RequestLog

logger = init_logger(__name__)


class Watch:
    """The scheduler's end of the stats socket.

    Args:
        store: opened.
        namespace: of the store.
        log: the last requests.
        reset: forgets everything.
        model: its name, for people.
    """

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        log: RequestLog,
        reset: Callable[[], None],
        model: str,
    ) -> None:
        config = store.config
        self._control = Control(store, namespace, reset)
        self._publisher = Publisher(store.snapshot, log.copy)
        info = {
            "protocol": VERSION,
            **build_labels(),
            "model": model,
            "namespace": namespace.digest.hex(),
            "started": time.time(),
            "tiers": [{"name": tier.name, "type": tier.type} for tier in config.tiers],
            "chunk_tokens": store.layout.chunk_tokens,
            "chunk_bytes": store.layout.slot_bytes,
        }
        self._server = StatsServer(self._publisher, info, config.stats.control)

    def open(self) -> bool:
        """Begin; False, and one line in the log, if there is no place for the socket."""
        try:
            self._server.start()
        except (StatsError, OSError) as error:
            logger.warning("TierKV: no stats socket: %s", error)
            return False
        self._publisher.publish(idle=True)
        logger.info("TierKV: stats socket %s; run: tierkv top", self._server.path)
        return True

    def act(self) -> None:
        """Do what users asked for. O(1) if nothing was."""
        self._publisher.run_commands(self._run)

    def _run(self, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
        result = self._control.run(op, arguments)
        logger.info("TierKV: %s of %d chunks, through the stats socket", op, result["chunks"])
        return result

    def tell(self, idle: bool) -> None:
        """Call in every step: see `Publisher.publish`."""
        self._publisher.publish(idle)

    def close(self) -> None:
        """End; what an idle engine was asked for is done before."""
        self.act()
        self._server.close()
