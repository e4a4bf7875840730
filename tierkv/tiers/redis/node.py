# SPDX-License-Identifier: Apache-2.0
"""The connections to one server: some for loads, some for saves, one for small requests.

Apart, so that a load never waits for a save to be sent, nor the question what is there for a value
on its way. All are opened ahead and opened again when they are lost; nobody waits for that, who
finds none goes without.

Threads and ownership. Belongs to the event loop. One task a node, started by `start` and ended by
`stop`; it dials, one connection at a time, and sleeps longer after each failure in a row, up to
`MOST_SECONDS`. If it dies there are no connections: the tier is unavailable.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from tierkv.config.redis import RedisConfig
from tierkv.errors import ErrorKind
from tierkv.tiers.redis.dial import Dialer, DialError, Endpoint
from tierkv.tiers.redis.link import Link

logger = logging.getLogger(__name__)

DIAL_SECONDS = 2.0
"""For one connection to be opened."""

LEAST_SECONDS = 0.05
MOST_SECONDS = 5.0
"""Pause after the first and after many failures to connect, plus up to a quarter at random, so that
many engines do not come back in step."""

Resolve = Callable[[], Awaitable[Endpoint]]


class Lane:
    """Connections of one use; the least busy is taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.links: list[Link] = []

    def pick(self) -> Link | None:
        return min(self.links, key=lambda link: link.pending, default=None)


class Node:
    """See the module.

    Args:
        resolve: where the server is now; may raise DialError.
        on_change: called when the first connection was made and when the last was lost.
        master: accept only a master there.
    """

    def __init__(
        self,
        config: RedisConfig,
        dialer: Dialer,
        resolve: Resolve,
        on_change: Callable[[Node], None],
        *,
        master: bool = False,
    ) -> None:
        self.endpoint: Endpoint | None = None
        """Where the connections lead."""
        self.error: DialError | None = None
        """Why the last attempt failed; None if it did not."""
        self.tried = asyncio.Event()
        """Set once there is a connection for each use, or there was a failure."""
        saves = max(1, config.max_connections // 4)
        self.control = Lane(1)
        self.saves = Lane(saves)
        self.loads = Lane(config.max_connections - saves - 1)
        self._lanes = (self.control, self.loads, self.saves)
        self._name = config.name
        self._dialer = dialer
        self._resolve = resolve
        self._on_change = on_change
        self._master = master
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._complained = False

    @property
    def is_up(self) -> bool:
        """Whether requests have somewhere to go."""
        return bool(self.control.links)

    @property
    def links(self) -> list[Link]:
        return [link for lane in self._lanes for link in lane.links]

    def control_link(self) -> Link | None:
        return self.control.pick()

    def load_link(self) -> Link | None:
        return self.loads.pick() or self.control.pick()

    def save_link(self) -> Link | None:
        # Never the other ones: a value is sent piece by piece, and nothing may get in between.
        return self.saves.pick()

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name=f"tierkv-{self._name}-connections")

    async def stop(self) -> None:
        """Close all connections and end the task. May be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        links = self.links
        self.drop()
        for link in links:
            await link.gone.wait()

    def drop(self) -> None:
        """Give all connections up, to open new ones."""
        for link in self.links:
            link.abort(ErrorKind.EIO)

    async def _keep(self) -> None:
        pause = LEAST_SECONDS
        while True:
            lane = self._short_lane()
            if lane is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                link = await self._dial()
            except DialError as error:
                self.error = error
                self._complain(error)
            except Exception as error:
                # A bug, of ours or of a library: the connections are lost, not the task.
                self.error = DialError(f"{type(error).__name__}", ErrorKind.WORKER)
                logger.exception("tier %s: cannot connect", self._name)
            else:
                pause = LEAST_SECONDS
                self._add(lane, link)
                continue
            self.tried.set()
            await asyncio.sleep(pause * (1 + random.random() / 4))
            pause = min(pause * 2, MOST_SECONDS)

    async def _dial(self) -> Link:
        endpoint = await self._resolve()
        if endpoint != self.endpoint:
            self.drop()
            self.endpoint = endpoint
        return await self._dialer.dial(endpoint, DIAL_SECONDS, master=self._master)

    def _short_lane(self) -> Lane | None:
        """The lane that lacks a connection most."""
        short = [lane for lane in self._lanes if len(lane.links) < lane.size]
        return min(short, key=lambda lane: len(lane.links), default=None)

    def _add(self, lane: Lane, link: Link) -> None:
        if not link.is_open:
            return
        lane.links.append(link)
        link.on_lost = lambda lost: self._lost(lane, lost)
        self.error = None
        if lane is self.control:
            if self._complained:
                logger.info("tier %s: %s is back", self._name, self.endpoint)
                self._complained = False
            self._on_change(self)
        if all(lane.links for lane in self._lanes):
            self.tried.set()

    def _lost(self, lane: Lane, link: Link) -> None:
        lane.links.remove(link)
        self._wake.set()
        if not self.links:
            self._on_change(self)

    def _complain(self, error: DialError) -> None:
        # Once for each time that it goes away.
        if not self.is_up and not self._complained:
            self._complained = True
            logger.warning("tier %s: %s; tried again in the background", self._name, error)
