# SPDX-License-Identifier: Apache-2.0
"""The Redis tier: one key a chunk on a server that many engines share.

`lookup` answers from what the server said last (`Verdicts`); `probe` asks it about a whole chain in
one round trip. A load is one GET, pipelined with the others, received straight into the slot and
verified there. A server that is away, slow, full or lying costs hits and nothing else: every call
ends by its deadline, nothing is tried twice, and connections come back in the background.

**Threads and ownership.** The event loop owns everything here; `lookup` and `usage` may be called
from any thread: they read single values. Tasks: `Upkeep.run`, begun by `open`, and short errands
(`_spawn`); `close` ends them all. Each `Node` has a task of its own for its connections.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from tierkv.codecs.raw import RawCodec
from tierkv.config.redis import RedisConfig
from tierkv.errors import ErrorKind, FormatError, GeometryError, TierError
from tierkv.keys import Chunk
from tierkv.pages.layout import SlotLayout
from tierkv.record import RecordFormat, checksum
from tierkv.tiers.base import Outcome, Presence, Result, Tier, TierReport, Usage
from tierkv.tiers.pause import Pause
from tierkv.tiers.redis.check import inspect
from tierkv.tiers.redis.commands import (
    Reply,
    ReplyError,
    command,
    is_unavailable,
    kind_of,
    refuses_writes,
    set_head,
)
from tierkv.tiers.redis.dial import DialError
from tierkv.tiers.redis.link import Buffer, Link, LinkLost, NotSent
from tierkv.tiers.redis.names import Names
from tierkv.tiers.redis.node import Node
from tierkv.tiers.redis.renewal import Renewal
from tierkv.tiers.redis.sinks import RecordSink
from tierkv.tiers.redis.talk import Talk
from tierkv.tiers.redis.upkeep import Upkeep
from tierkv.tiers.redis.verdicts import Verdicts

OPEN_SECONDS = 0.9
"""For a server to be found at start; the engine does not wait longer."""

MAX_VALUE_BYTES = 512 << 20
"""Redis's own limit (proto-max-bulk-len)."""


class RedisTier(Tier):
    """See the module. One namespace; opened once.

    Args:
        config: its section of the configuration.
        clock: seconds, monotonic: for verdicts, renewals and pauses. Deadlines are the loop's.
        wall_ns: ns since 1970, written into records.
    """

    def __init__(
        self,
        config: RedisConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.name = config.name
        self.talk: Talk | None = None
        """With the servers; None before `open`."""
        self._config = config
        self._clock = clock
        self._wall_ns = wall_ns
        self._is_open = False
        self._verdicts = Verdicts(clock, config.miss_ttl)
        self._record_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life ------------------------------------------------------------------------------------

    async def open(self, namespace: bytes, layout: SlotLayout) -> TierReport:
        started = self._clock()
        config = self._config
        self._layout = layout
        self._format = RecordFormat(namespace, layout, alignment=8)
        self._record_bytes = self._format.max_record_bytes
        if self._record_bytes > MAX_VALUE_BYTES:
            raise TierError(
                f"a chunk of {self._record_bytes} bytes is more than a Redis value can have (512 "
                "MiB); set chunk_tokens lower",
                tier=self.name,
            )
        self._names = Names(config.key_prefix, namespace, layout)
        self._turns = asyncio.Semaphore(max(1, config.max_inflight // self._record_bytes))
        self._sequence = itertools.count(1)
        self._saving: dict[bytes, asyncio.Future[Result]] = {}
        self._save_pause = Pause(self._clock)
        self._forgets = 0  # how often something was forgotten: what began before may be stale
        try:
            self.talk = Talk(config, self._verdicts.clear)
            self._upkeep = Upkeep(config, self.talk, self._names, self._adopted)
            self._renewal = Renewal(
                config.ttl, self._clock, self._verdicts, self._names, self.talk, self._spawn
            )
            notes = await self._first_contact(self.talk)
        except DialError as error:
            await self._let_go()
            raise TierError(str(error), tier=self.name) from None
        except BaseException:
            await self._let_go()
            raise
        self._is_open = True
        self._spawn(self._upkeep.run())
        return TierReport(seconds=self._clock() - started, notes=tuple(notes))

    async def describe(self, about: Mapping[str, str]) -> None:
        self._spawn(self._keep_described(json.dumps(dict(about), ensure_ascii=False).encode()))

    async def _keep_described(self, text: bytes) -> None:
        """Say it again before it expires, or soon if the server was not there."""
        ttl = self._config.ttl
        life = () if ttl is None else (text, b"PX", b"%d" % round(4000 * ttl))
        while self.talk is not None:
            told = await self.talk.each(b"SET", {b"": self._names.of_about}, *(life or (text,)))
            if told.get(b"") == b"OK" and ttl is None:
                return
            await asyncio.sleep(ttl if ttl is not None and told.get(b"") == b"OK" else 60.0)

    async def _first_contact(self, talk: Talk) -> list[str]:
        """What there is to say about the servers.

        Raises:
            DialError: something that waiting does not mend.
        """
        notes = []
        deadline = asyncio.get_running_loop().time() + OPEN_SECONDS
        try:
            async with asyncio.timeout_at(deadline):
                problem = await talk.topology.start()
                if problem is not None and problem.fatal:
                    raise problem
                if problem is not None:
                    notes.append(f"{problem}; the engine starts without it, and it is tried again")
                for node in talk.topology.nodes():
                    link = node.control_link()
                    if link is None or node.endpoint is None:
                        continue
                    for found in await inspect(link, node.endpoint, self._config, deadline):
                        if found.fatal:
                            raise DialError(found.message, ErrorKind.AUTH, fatal=True)
                        notes.append(found.message)
                await self._upkeep.settle()
        except TimeoutError:
            hint = " (is it the TLS port?)" if self._config.uses_tls else ""
            notes.append(
                f"{self._config.url}: no answer within a second{hint}; the engine starts without "
                "it, and it is tried again"
            )
        return notes

    async def close(self) -> None:
        self._is_open = False
        await self._let_go()

    async def _let_go(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if self.talk is not None:
            await self.talk.topology.stop()
        if tasks:
            await asyncio.wait(tasks)
        self._verdicts.clear()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def is_ready(self) -> bool:
        """Whether a server was reached since `open`. Any thread."""
        return self._is_open and self._names.generation.word is not None

    async def look_after(self) -> None:
        """What is done every few seconds: find failovers, other engines' `clear`, dead links."""
        if self._is_open:
            await self._upkeep.look()

    # -- asking ----------------------------------------------------------------------------------

    def lookup(self, key: bytes) -> Presence:
        return self._verdicts.presence(key)

    def usage(self) -> Usage:
        """What this engine knows to be there; others may have stored more, the server lost some."""
        chunks = len(self._verdicts)
        return Usage(chunks, chunks * self._record_bytes, 0)

    async def probe(self, keys: Sequence[bytes]) -> None:
        unknown = [key for key in keys if self.lookup(key) is Presence.UNKNOWN]
        if not unknown or not self.is_ready or self.talk is None:
            return
        forgets = self._forgets
        found = await self.talk.each(b"EXISTS", self._names.of_all(unknown))
        if self._forgets != forgets:
            return  # what was there then need not be there now
        due = self._renewal.due_after_answer()
        for key, reply in found.items():
            if reply == 1:
                self._verdicts.hit(key, due)
            elif reply == 0:
                self._verdicts.miss(key)

    async def touch(self, keys: Sequence[bytes]) -> None:
        if self.is_ready:
            await self._renewal.now(keys)

    # -- loading ---------------------------------------------------------------------------------

    async def load(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        if not self.is_ready or self.talk is None:
            return Result(Outcome.REFUSED)
        if not self._fits(parts):
            return Result(Outcome.FAILED, ErrorKind.GEOMETRY)
        deadline = asyncio.get_running_loop().time() + self._config.load_deadline
        try:
            async with asyncio.timeout_at(deadline):
                await self._turns.acquire()
        except TimeoutError:
            return Result(Outcome.REFUSED)  # too many before it
        try:
            return await self._load(self.talk, chunk, _as_bytes(parts), deadline)
        finally:
            self._turns.release()

    async def _load(
        self, talk: Talk, chunk: Chunk, parts: list[memoryview], deadline: float
    ) -> Result:
        name = self._names.of(chunk.key)
        if name is None or not self._is_open:
            return Result(Outcome.REFUSED)
        forgets = self._forgets
        sink = RecordSink(self._format, chunk, parts)
        request = command(b"GET", name)

        async def get(link: Link, before: bytes) -> Reply:
            return await link.fetch(before + request, 1 + bool(before), sink, deadline)

        try:
            reply = await talk.one(name, Node.load_link, get)
            if isinstance(reply, int):
                sink.verify()
        except LinkLost as lost:
            if sink.error is not None:
                self._drop_bad(chunk.key, name)
                return Result(Outcome.FAILED, sink.error.kind)
            return Result(Outcome.FAILED, lost.kind)
        except FormatError as error:
            self._drop_bad(chunk.key, name)
            return Result(Outcome.FAILED, error.kind, sink.length)
        if isinstance(reply, ReplyError):
            return self._not_loaded(chunk.key, name, reply)
        if reply is None:
            self._verdicts.miss(chunk.key)
            return Result(Outcome.MISS)
        if self._forgets != forgets:
            return Result(Outcome.MISS)  # perhaps this one
        if self.lookup(chunk.key) is not Presence.HIT:
            self._verdicts.hit(chunk.key, self._renewal.due_after_answer())
        self._renewal.soon(chunk.key)
        return Result(Outcome.DONE, nbytes=sink.length)

    def _not_loaded(self, key: bytes, name: bytes, error: ReplyError) -> Result:
        if is_unavailable(error):
            self._verdicts.clear()  # it restarts or is replaced: who knows what is there now
            return Result(Outcome.REFUSED)
        kind = kind_of(error)
        if kind is ErrorKind.FORMAT:
            self._drop_bad(key, name)
        return Result(Outcome.FAILED, kind)

    def _drop_bad(self, key: bytes, name: bytes) -> None:
        """Have a value that is not what it should be out of the way, so that it is saved anew."""
        self._verdicts.miss(key)
        self._spawn(self._unlink_quietly({key: name}))

    async def _unlink_quietly(self, names: Mapping[bytes, bytes]) -> None:
        if self.talk is not None:
            await self.talk.each(b"UNLINK", names)

    # -- saving ----------------------------------------------------------------------------------

    async def save(self, chunk: Chunk, parts: Sequence[memoryview]) -> Result:
        key = chunk.key
        if not self.is_ready or self.talk is None:
            return Result(Outcome.REFUSED)
        if not self._fits(parts):
            return Result(Outcome.FAILED, ErrorKind.GEOMETRY)
        if self.lookup(key) is Presence.HIT:
            return Result(Outcome.DONE)
        other = self._saving.get(key)
        if other is not None:
            # Shielded: our cancellation must not end the other one's wait.
            result = await asyncio.shield(other)
            return Result(result.outcome, result.error)
        if not self._save_pause.is_over:
            return Result(Outcome.REFUSED)
        mine = self._saving[key] = asyncio.get_running_loop().create_future()
        result = Result(Outcome.REFUSED)
        try:
            # Another engine may have been faster; asking costs less than sending.
            await self.probe([key])
            if self.lookup(key) is Presence.HIT:
                self._renewal.soon(key)
                result = Result(Outcome.DONE)
            else:
                result = await self._save(self.talk, chunk, _as_bytes(parts))
        except GeometryError:
            result = Result(Outcome.FAILED, ErrorKind.GEOMETRY)
        finally:
            del self._saving[key]
            mine.set_result(result)
        return result

    async def _save(self, talk: Talk, chunk: Chunk, parts: list[memoryview]) -> Result:
        name = self._names.of(chunk.key)
        if name is None or not self._is_open:
            return Result(Outcome.REFUSED)
        forgets = self._forgets
        deadline = asyncio.get_running_loop().time() + self._config.save_deadline
        header = bytearray(self._format.header_bytes)
        self._format.pack_header(
            header,
            chunk,
            codec_id=RawCodec.codec_id,
            sequence=next(self._sequence),
            created_ns=self._wall_ns(),
            stored_bytes=self._layout.slot_bytes,
            payload_checksum=checksum(parts),
        )
        ttl_ms = None if self._config.ttl is None else round(self._config.ttl * 1000)
        head, tail = set_head(name, self._record_bytes, ttl_ms)

        async def put(link: Link, before: bytes) -> Reply:
            pieces: list[Buffer] = [before + head + header, *parts, tail]
            return await link.push(pieces, 1 + bool(before), deadline)

        try:
            reply = await talk.one(name, Node.save_link, put)
        except NotSent:
            return Result(Outcome.REFUSED)
        except LinkLost as lost:
            return Result(Outcome.FAILED, lost.kind)
        if isinstance(reply, ReplyError):
            return self._not_saved(talk, name, reply)
        self._save_pause.reset()
        if self._forgets == forgets:
            self._verdicts.hit(chunk.key, self._renewal.due_after_save())
        return Result(Outcome.DONE, nbytes=self._record_bytes)

    def _not_saved(self, talk: Talk, name: bytes, error: ReplyError) -> Result:
        if is_unavailable(error):
            return Result(Outcome.REFUSED)
        if not refuses_writes(error):
            return Result(Outcome.FAILED, kind_of(error))
        self._save_pause.begin()
        if error.code == "READONLY":
            # A master has become a replica. Its name may lead to another server by now.
            talk.moved()
            node = talk.topology.node_for(name)
            for link in [*node.saves.links] if node is not None else ():
                link.abort(ErrorKind.EIO)
        return Result(Outcome.REFUSED, ErrorKind.ENOSPC if error.code == "OOM" else None)

    # -- forgetting ------------------------------------------------------------------------------

    async def evict(self, keys: Sequence[bytes]) -> int:
        """See `Tier`.

        Raises:
            TierError: the servers could not be told; the caller tells again later, and does not
                ask for these keys until then.
        """
        if not self._is_open or self.talk is None:
            return 0
        self._forgets += 1
        wanted = dict.fromkeys(keys)
        for key in wanted:
            self._verdicts.miss(key)
        await self._end_of_saves(wanted)
        names = self._names.of_all(wanted)
        found = await self.talk.each(b"UNLINK", names)
        counts = [reply for reply in found.values() if isinstance(reply, int)]
        if len(counts) < len(wanted):
            raise TierError(
                "the server cannot be told to forget chunks; it is told again later",
                tier=self.name,
            )
        return sum(counts)

    async def clear(self) -> int:
        """Forget the namespace, for all engines that share it; returns how many this one knew."""
        if not self._is_open or self.talk is None:
            return 0
        self._forgets += 1
        known = self._verdicts.hits()
        names = self._names.of_all(known)
        self._names.generation.renew()
        self._verdicts.clear()
        await self._end_of_saves(list(self._saving))
        await self._upkeep.settle()
        await self.talk.each(b"UNLINK", names)  # nobody asks for them: it only makes room sooner
        return len(known)

    def _adopted(self) -> None:
        """Another engine has cleared the namespace."""
        self._forgets += 1
        self._verdicts.clear()

    async def _end_of_saves(self, keys: Iterable[bytes]) -> None:
        saves = [self._saving[key] for key in keys if key in self._saving]
        if saves:
            await asyncio.wait(saves)

    # --------------------------------------------------------------------------------------------

    def _fits(self, parts: Sequence[memoryview]) -> bool:
        stride = self._layout.part_stride
        return [part.nbytes for part in parts] == [stride] * self._layout.ranks


def _as_bytes(parts: Sequence[memoryview]) -> list[memoryview]:
    return [part if part.format == "B" and part.ndim == 1 else part.cast("B") for part in parts]
