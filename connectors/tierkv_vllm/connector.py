# SPDX-License-Identifier: Apache-2.0
"""The connector class that vLLM loads: a facade over the scheduler's and the worker's half.

vLLM makes one instance beside its scheduler and one in each worker, and imports the class in the
API server too. An exception that leaves a hook ends the engine, so none does: the hook logs it,
TierKV stands aside from then on, and requests run as if it were absent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from tierkv.config import load_config
from tierkv.errors import TierKVError, UnsupportedError
from tierkv_vllm import logs, metrics
from tierkv_vllm.compat import cache_hit_sources, check_version
from tierkv_vllm.messages import StepPlan, WorkerFacts, WorkerReport

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from tierkv_vllm.scheduler import SchedulerSide
    from tierkv_vllm.worker import WorkerSide

logger = init_logger(__name__)

Hook = TypeVar("Hook", bound=Callable[..., Any])


def _guarded(default: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """A hook that, if it raises, stands TierKV aside and returns `default()` instead."""

    def wrap(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def safe(self: TierKVConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                self._stand_aside(f"{hook.__name__} raised; please report this", trace=True)
                return default()

        return cast(Hook, safe)

    return wrap


class TierKVConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's docstring; the contract of each hook is vLLM's `KVConnectorBase_V1`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        logs.join_vllm()
        check_version()
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._aside: str | None = None
        self._aside_kind, self._aside_told = "", True
        self._block_pool: BlockPool | None = None
        # A configuration that cannot be used stops the engine here, with every problem by its line.
        self._loaded = load_config(inline=self._kv_transfer_config.kv_connector_extra_config)
        if role == KVConnectorRole.SCHEDULER:
            self._recompute_on_failure(self._kv_transfer_config)
        else:
            from tierkv_vllm.worker import WorkerSide

            self._worker = WorkerSide(self._loaded, vllm_config, kv_cache_config)

    @staticmethod
    def _recompute_on_failure(transfer: KVTransferConfig) -> None:
        # vLLM's default fails the request when a load fails; its scheduler reads the policy right
        # after it made this object. A cache must never fail a request.
        if transfer.kv_load_failure_policy != "recompute":
            transfer.kv_load_failure_policy = "recompute"
            logger.info("TierKV: kv_load_failure_policy set to recompute")

    def _stand_aside(self, reason: str, kind: str = "error", *, trace: bool = False) -> None:
        """Serve without TierKV from now on; `kind` is the label of `tierkv_aside`."""
        if self._aside is None:
            self._aside = reason
            self._aside_told = False
            self._aside_kind = kind
            logger.error(
                "TierKV stands aside: %s. The engine serves without it.",
                reason.rstrip("."),
                exc_info=trace,
            )

    # Properties and class-level answers

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a later miss, nothing more."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """No wish: any layout that keeps a block's page of a layer together is served."""
        return None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return metrics.TierKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return metrics.TierKVPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    # Scheduler half

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._block_pool = gpu_block_pool

    @_guarded(lambda: None)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers are ready: open the store."""
        from tierkv_vllm.opening import open_scheduler_side

        facts = {rank: fact for rank, fact in metadata.items() if isinstance(fact, WorkerFacts)}
        try:
            self._scheduler = open_scheduler_side(
                self._loaded, self._vllm_config, self._kv_cache_config, facts
            )
        except TierKVError as error:
            unsupported = isinstance(error, UnsupportedError)
            self._stand_aside(str(error), "unsupported" if unsupported else "not_opened")
            return
        if self._block_pool is not None:
            self._scheduler.bind_block_pool(self._block_pool)

    @property
    def _planner(self) -> SchedulerSide | None:
        """The scheduler's half, unless TierKV stands aside."""
        return self._scheduler if self._aside is None else None

    @_guarded(lambda: None)
    def on_new_request(self, request: Request) -> None:
        if planner := self._planner:
            planner.on_new_request(request)

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        planner = self._planner
        return planner.matched_tokens(request, num_computed_tokens) if planner else (0, False)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is None:
            return
        try:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)
        except Exception:
            self._stand_aside("update_state_after_alloc raised; please report this", trace=True)
            if num_external_tokens > 0:
                self._scheduler.fail_load(request)

    @_guarded(dict)
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        if self._scheduler is None or num_external_tokens == 0:
            return {}
        return cache_hit_sources(self._scheduler.hit_tokens_by_tier_type(request))

    @_guarded(StepPlan)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepPlan()
        if self._aside is not None:
            return self._scheduler.plan_pending_loads()
        return self._scheduler.plan_step(scheduler_output)

    @_guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is None:
            return
        # The report first: it tells how long a blend took, which is over with `loaded`.
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._scheduler.saved(report)
        self._scheduler.loaded(
            connector_output.finished_recving or (), connector_output.failed_recving or ()
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are never held back: their bytes outlive their owner until the next write."""
        if self._scheduler is None:
            return False, None
        return False, self._scheduler.finished(request)

    @_guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_work()

    @_guarded(lambda: True)
    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.facts if self._worker is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None and isinstance(kv_connector_metadata, StepPlan):
            self._worker.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None and self.has_connector_metadata():
            plan = self._get_connector_metadata()
            assert isinstance(plan, StepPlan)
            self._worker.start_load_kv(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        """Nothing to do: saves are whole chunks, one step later."""

    def wait_for_save(self) -> None:
        """Nothing to wait for, see `save_kv_layer`."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        return self._worker.get_transfer_results()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.build_worker_meta() if self._worker is not None else None

    # Both

    @_guarded(lambda: None)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counters live beside the scheduler; workers report through their jobs."""
        stats = metrics.collect(self._scheduler) if self._scheduler is not None else None
        if self._aside is not None and not self._aside_told:
            self._aside_told = True
            stats = metrics.with_aside(stats, self._aside_kind)
        return stats

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()
