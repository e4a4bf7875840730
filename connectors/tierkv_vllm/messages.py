# SPDX-License-Identifier: Apache-2.0
"""What the two halves of the connector say to each other: plain values, one direction each.

vLLM pickles these between its own processes, or passes them by reference in a single process: they
are frozen, and nothing that was read from a tier is ever put into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tierkv.pages.pool import RegionHandle
from tierkv_vllm.blend.messages import BlendNews, BlendOrders

CopyOps = npt.NDArray[np.int32]
"""[n, 3]: DRAM slot, index of the block in its chunk, engine block id; one row a block."""


@dataclass(frozen=True, slots=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """What only a worker knows, sent once before the first step.

    Attributes:
        refusal: why this worker cannot serve; empty if it can. The rest is then meaningless.
        block_bytes: bytes of one engine block, all layers of this rank.
        region: its part of the DRAM pool, for the scheduler's process to map; None where another
            worker holds the same KV and keeps that part.
        fields: facts that decide what the bytes mean (device, layout, CPU instruction set).
        blends: it can reuse any text, not only prefixes.
        notes: things an operator should know, one sentence each.
    """

    refusal: str = ""
    block_bytes: int = 0
    region: RegionHandle | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    blends: bool = False


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Copy DRAM slots into a request's blocks. Empty `ops` means: report it failed."""

    job_id: int
    request_id: str
    ops: CopyOps


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Copy engine blocks, all written by earlier steps, into DRAM slots."""

    job_id: int
    ops: CopyOps


@dataclass(frozen=True, slots=True)
class StepPlan(KVConnectorMetadata):
    """Scheduler to workers, one a step.

    Attributes:
        loads: started after the step's forward was launched.
        save: submitted before the step writes anything.
        fences: save jobs whose blocks this step hands out again; they come before its writes.
        blend: what is to be done for prompts that reuse any text.
    """

    loads: tuple[LoadJob, ...] = ()
    save: SaveJob | None = None
    fences: tuple[int, ...] = ()
    blend: BlendOrders | None = None


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler.

    Attributes:
        saves: per save job how many ranks ended it, and whether all succeeded.
        blend: what happened to prompts that reuse any text.
    """

    saves: dict[int, tuple[int, bool]] = field(default_factory=dict)
    blend: BlendNews | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        merged = dict(self.saves)
        for job_id, (ranks, ok) in other.saves.items():
            have, was_ok = merged.get(job_id, (0, True))
            merged[job_id] = (have + ranks, was_ok and ok)
        blend = self.blend or other.blend
        if self.blend is not None and other.blend is not None:
            blend = self.blend.merged(other.blend)
        return WorkerReport(merged, blend)
