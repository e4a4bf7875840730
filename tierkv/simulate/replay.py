# SPDX-License-Identifier: Apache-2.0
"""One trace against one set of capacities, through the index and the policies that an engine uses.

Keys and slots only: no KV, no I/O, no time. Each request is over before the next one begins, every
read and write succeeds at once, and the engine's own prefix cache is empty. What is called and in
which order is the Store's: a test replays the same prompts through a real Store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.policies import make_policy
from tierkv.simulate.trace import Prompt
from tierkv.tiers.slot_index import SlotIndex


@dataclass(slots=True)
class Found:
    """What a replay found.

    Attributes:
        dram_tokens: prompt tokens that came from DRAM.
        disk_tokens: prompt tokens that came from disk.
        disk_writes: chunks written to disk.
        disk_reads: chunks read from disk.
    """

    dram_tokens: int = 0
    disk_tokens: int = 0
    disk_writes: int = 0
    disk_reads: int = 0


class Replay:
    """Two tiers that start empty.

    Args:
        dram_slots: chunks that DRAM holds, at least 1.
        disk_slots: chunks that the disk holds; 0: no disk.
        policy: name of the eviction policy of both.
        write: when a chunk goes to disk, `through` or `on_reuse`, as in the configuration.
    """

    def __init__(self, dram_slots: int, disk_slots: int, policy: str, write: str) -> None:
        self.dram = SlotIndex(dram_slots, make_policy(policy, dram_slots))
        self.disk = SlotIndex(disk_slots, make_policy(policy, disk_slots)) if disk_slots else None
        self.found = Found()
        self._write = write

    def request(self, prompt: Prompt, block_tokens: int) -> None:
        """Look the prompt up, load what is there, save the rest. About 2 µs a chunk."""
        keys, dram, disk = prompt.keys, self.dram, self.disk
        held = dram.lease_run(keys)
        leading = len(held)
        promoted: list[int] = []
        if disk is not None:
            if leading < len(keys):
                promoted = self._load(disk, keys, held)
            if self._write == "on_reuse":
                self._write_down(disk, keys[:leading])
        self._count(prompt, held, promoted, block_tokens)
        dram.touch_run(held)
        saved = self._save(keys) if len(held) < len(keys) else []
        if disk is not None and self._write == "through":
            self._write_down(disk, saved)
        release = dram.release
        for slot in held:
            release(slot)
        self._touch(keys)

    def _load(self, disk: SlotIndex, keys: Sequence[bytes], held: list[int]) -> list[int]:
        """Go on with a run where DRAM has a gap. Leases what it finds, adds it to `held`.

        Returns:
            The slots of those chunks that were read from disk.
        """
        dram = self.dram
        run: list[int | None] = []
        wanted = []
        for key in keys[len(held) :]:
            slot = dram.get(key)
            if slot is not None:
                dram.lease(slot)
            elif disk.get(key) is not None:
                wanted.append(key)
            else:
                break
            run.append(slot)
        slots = dram.reserve_run(wanted)
        for slot in slots:
            dram.publish(slot)
            dram.lease(slot)
        rest = iter(slots)
        room = True
        for slot in run:
            if slot is None:
                slot = next(rest, None)
                room = room and slot is not None
                if slot is None:
                    continue
            if room:
                held.append(slot)
            else:
                dram.release(slot)  # behind the chunk for which there was no room
        return slots

    def _count(
        self, prompt: Prompt, held: list[int], promoted: list[int], block_tokens: int
    ) -> None:
        found = self.found
        found.dram_tokens += (len(held) - len(promoted)) * block_tokens
        found.disk_tokens += len(promoted) * block_tokens
        found.disk_reads += len(promoted)
        if held and len(held) * block_tokens == prompt.tokens:
            # The last token is always computed.
            if promoted and promoted[-1] == held[-1]:
                found.disk_tokens -= 1
            else:
                found.dram_tokens -= 1

    def _save(self, keys: Sequence[bytes]) -> list[bytes]:
        """Reserve what DRAM lacks, as far as there is room; the keys that got it."""
        lacking = [key for key in keys if self.dram.find(key) is None]
        slots = self.dram.reserve_run(lacking)
        publish = self.dram.publish
        for slot in slots:
            publish(slot)
        return lacking[: len(slots)]

    def _write_down(self, disk: SlotIndex, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if disk.get(key) is None:
                slot = disk.reserve(key)
                assert slot is not None, "nothing on disk is leased"
                disk.publish(slot)
                self.found.disk_writes += 1

    def _touch(self, keys: Sequence[bytes]) -> None:
        for index in (self.dram, self.disk):
            if index is not None:
                slots = [slot for key in keys if (slot := index.get(key)) is not None]
                index.touch_run(slots)
