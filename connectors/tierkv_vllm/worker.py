# SPDX-License-Identifier: Apache-2.0
"""The half of the connector that lives in each vLLM worker: moves pages as it is told.

It keeps no state of requests and decides nothing: everything comes in the step's `StepPlan`, so all
ranks act alike. One step, in vLLM's order of calls (model runner V1; V2 zeroes before the first):

    handle_preemptions   submit this step's saves (earlier steps wrote them), then the fences
    start_load_kv        start this step's loads, after the forward was launched
    get_transfer_results which loads ended; a failed one is recomputed by the engine
    build_worker_meta    which saves ended

Threads and ownership. Everything runs on the worker's model thread. CUDA streams, if any, belong
to the mover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from tierkv.config import LoadedConfig
from tierkv.errors import ConfigError, TierKVError
from tierkv.pages.geometry import PageTable
from tierkv.pages.mover import PageMover, make_mover
from tierkv.pages.pool import PoolRegion
from tierkv_vllm import kv_pages
from tierkv_vllm.blend.messages import Ended
from tierkv_vllm.messages import StepPlan, WorkerFacts, WorkerReport
from tierkv_vllm.replicas import Replicas, replicas_of
from tierkv_vllm.settings import make_region, slot_layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from tierkv_vllm.blend.runner import Runner

logger = init_logger(__name__)


class WorkerSide:
    """Owns this rank's part of the DRAM pool and the mover over it.

    Args:
        loaded: TierKV's configuration.
        vllm_config, kv_cache_config: as vLLM gives them to the connector.
    """

    def __init__(
        self, loaded: LoadedConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        self._loaded = loaded
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._region: PoolRegion | None = None
        self._mover: PageMover | None = None
        self._saves = True
        self._facts = WorkerFacts(refusal="vLLM registered no KV cache")
        self._loads: dict[int, str] = {}
        self._failed_at_once: set[str] = set()
        self._report = WorkerReport()
        self._runner: Runner | None = None
        self._blend_ended = Ended()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take vLLM's KV tensors into use. Blocks while host memory is reserved and pinned.

        Raises:
            ConfigError: the configuration does not fit the engine; better now than a silent cache.
        """
        try:
            with replicas_of(self._vllm_config, self._kv_cache_config) as replicas:
                self._facts = self._open(kv_caches, replicas)
        except ConfigError:
            raise
        except (TierKVError, OSError, MemoryError) as error:
            self._facts = WorkerFacts(refusal=str(error))
        except Exception as error:
            # Torch, Triton or a driver: whatever it is, the engine serves without us.
            logger.exception("TierKV: preparing the page mover raised")
            self._facts = WorkerFacts(refusal=f"{type(error).__name__}: {error}")

    def _open(self, kv_caches: dict[str, torch.Tensor], replicas: Replicas) -> WorkerFacts:
        kv_pages.check_supported(self._vllm_config, self._kv_cache_config)
        table = PageTable.from_layers(kv_pages.page_views(self._kv_cache_config, kv_caches))
        layout = slot_layout(
            self._loaded,
            kv_pages.group_sizes(self._kv_cache_config),
            table.block_bytes,
            self._vllm_config.parallel_config.world_size // replicas.count,
        )
        self._region = replicas.region(lambda: make_region(self._loaded, layout))
        self._saves = replicas.is_writer
        self._mover = make_mover(table, self._region)
        notes = (*self._mover.notes, *self._open_blending(kv_caches))
        return WorkerFacts(
            block_bytes=table.block_bytes,
            region=self._region.handle if replicas.is_writer else None,
            fields=kv_pages.worker_fields(self._vllm_config, self._kv_cache_config, kv_caches),
            notes=notes,
            blends=self._runner is not None,
        )

    def _open_blending(self, kv_caches: dict[str, torch.Tensor]) -> tuple[str, ...]:
        """Prepare for the reuse of any text, if it is wanted; returns why it cannot be, if so."""
        config = self._loaded.config.blend
        if config.mode == "off" or self._region is None:
            return ()
        from tierkv_vllm.blend.model import BlendModel
        from tierkv_vllm.blend.runner import Runner

        try:
            model = BlendModel(self._vllm_config, kv_caches)
            self._runner = Runner(
                model,
                self._region,
                config.max_blend_tokens_per_step,
                in_lockstep=self._vllm_config.parallel_config.world_size > 1,
            )
        except TierKVError as error:
            return (f"any-text reuse is off: {error}",)
        except Exception as error:
            # A model that is built in another way than was expected: prefixes are reused all the
            # same.
            logger.exception("TierKV: preparing any-text reuse raised")
            return (f"any-text reuse is off: {type(error).__name__}: {error}",)
        return ()

    @property
    def facts(self) -> WorkerFacts:
        """For the scheduler's half; complete once the KV caches were registered."""
        return self._facts

    def handle_preemptions(self, plan: StepPlan) -> None:
        """Before the step writes: submit its saves, and order its writes behind the fences."""
        if self._mover is None:
            return
        if plan.save is not None:
            if self._saves:
                self._mover.save(plan.save.job_id, plan.save.ops)
            else:
                self._report.saves[plan.save.job_id] = (1, True)
        if plan.fences:
            self._mover.fence(plan.fences)

    def start_load_kv(self, plan: StepPlan) -> None:
        """Start the step's loads; vLLM calls it after the forward of an asynchronous-only step."""
        for job in plan.loads:
            if self._mover is None or len(job.ops) == 0:
                self._failed_at_once.add(job.request_id)
                continue
            self._loads[job.job_id] = job.request_id
            self._mover.load(job.job_id, job.ops)
        if self._runner is not None:
            for blend in plan.blend.prepare if plan.blend is not None else ():
                if self._mover is not None and len(blend.exact_ops):
                    self._runner.awaits_load(blend.job_id)
                    self._mover.load(blend.job_id, blend.exact_ops)
            self._blend_ended = self._runner.step(plan.blend)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Each load exactly once, in the step in which nothing writes its blocks any more."""
        finished, failed = set(self._failed_at_once), set(self._failed_at_once)
        self._failed_at_once.clear()
        finished |= self._blend_ended.finished
        failed |= self._blend_ended.failed
        self._blend_ended = Ended()
        for done in self._mover.poll() if self._mover is not None else ():
            request_id = self._loads.pop(done.job_id, None)
            if self._runner is not None and self._runner.loaded(done.job_id, done.ok):
                continue
            if request_id is None:
                self._report.saves[done.job_id] = (1, done.ok)
                continue
            finished.add(request_id)
            if not done.ok:
                failed.add(request_id)
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_worker_meta(self) -> WorkerReport | None:
        """Save jobs that ended since the last call."""
        if self._runner is not None:
            self._report.blend = self._runner.news()
        if not self._report.saves and self._report.blend is None:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def shutdown(self) -> None:
        """Let go of the pool; idempotent."""
        self._runner = None
        mover, self._mover = self._mover, None
        region, self._region = self._region, None
        if mover is not None:
            mover.close()
        if region is not None:
            region.close()
