# SPDX-License-Identifier: Apache-2.0
"""From what the workers reported to an open store, or to the reason why TierKV stands aside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from tierkv import __version__
from tierkv.config import LoadedConfig, resolve_secret
from tierkv.config.blend import BlendConfig
from tierkv.errors import UnsupportedError
from tierkv.keys import Namespace
from tierkv.pages.layout import SlotLayout
from tierkv.pages.pool import DramPool, RegionHandle
from tierkv.store import Store, StoreReport
from tierkv_vllm import identity, kv_pages
from tierkv_vllm.groups import make_groups
from tierkv_vllm.messages import WorkerFacts
from tierkv_vllm.scheduler import SchedulerSide
from tierkv_vllm.settings import slot_layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


def open_scheduler_side(
    loaded: LoadedConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    facts: Mapping[tuple[int, int], WorkerFacts],
) -> SchedulerSide:
    """Open the store over the workers' pool regions and say so in one block of the log.

    Args:
        facts: by (pipeline rank, tensor-parallel rank).

    Raises:
        UnsupportedError: the engine cannot be served; the message is the reason.
    """
    ranks = [facts[rank] for rank in sorted(facts)]
    _check(ranks, vllm_config.parallel_config.world_size)
    config = loaded.config
    sizes = kv_pages.group_sizes(kv_cache_config)
    regions = _regions(ranks)
    layout = slot_layout(loaded, sizes, ranks[0].block_bytes, len(regions))
    secret = resolve_secret(config.key_secret) if config.key_secret else b""
    namespace = identity.namespace(vllm_config, kv_cache_config, _fields(ranks), secret)
    store = Store(config)
    report = store.open(namespace, layout, DramPool.attach(regions))
    for note in (*loaded.notes, *ranks[0].notes):
        logger.info("TierKV: %s", note)
    for warning in loaded.warnings:
        logger.warning("TierKV: %s", warning)
    for line in start_up_lines(report, layout, config.save):
        logger.info("%s", line)
    side = SchedulerSide(
        store,
        namespace,
        make_groups(sizes, layout.chunk_tokens),
        ranks=len(ranks),
        save_generated=config.save == "all",
    )
    if config.blend.mode != "off" and all(fact.blends for fact in ranks):
        recovered = sum(tier.recovered_chunks for tier in report.tiers.values())
        _blend(side, namespace, recovered, vllm_config, kv_cache_config, config.blend, len(ranks))
    if config.stats.socket:
        served = vllm_config.model_config.served_model_name
        side.watch(served[0] if isinstance(served, list) else str(served))
    return side


def _blend(
    side: SchedulerSide,
    namespace: Namespace,
    recovered: int,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    config: BlendConfig,
    ranks: int,
) -> None:
    events = vllm_config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        # They tell routers the tokens of each block; those of blended prompts are no exact prefix.
        logger.info("TierKV: any-text reuse is off: vLLM publishes KV events")
        return
    if len(kv_cache_config.kv_cache_groups) > 1:
        logger.info("TierKV: any-text reuse is off: the model has several KV cache groups")
        return
    from tierkv_vllm.blend.planner import Planner

    layout = side.store.layout
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or layout.block_tokens
    caching = vllm_config.cache_config.enable_prefix_caching
    planner = Planner(
        config,
        side.store,
        ranks=ranks,  # replicas too: each drafts, and none may be missing
        token_bytes=layout.block_bytes // layout.block_tokens,
        hash_block_tokens=hash_tokens if caching else None,
        job_id=side.new_job_id,
    )
    side.blend_with(planner)
    logger.info("TierKV: any-text reuse: %s", config.mode)
    try:
        donors = planner.recall(namespace.scope())
    except Exception:
        logger.exception("TierKV: what the tiers hold from earlier is not reused anywhere")
        return
    if recovered:
        logger.info("TierKV: %d of %d recovered chunks can be reused anywhere", donors, recovered)


def start_up_lines(report: StoreReport, layout: SlotLayout, save: str) -> list[str]:
    """What an operator wants to see once: version, namespace, chunk, tiers, what was recovered."""
    lines = [
        f"TierKV {__version__}: namespace {report.namespace[:12]}, chunks of {layout.chunk_tokens} "
        f"tokens ({size(layout.ranks * layout.part_bytes)}), saving "
        + ("prompts and generated tokens" if save == "all" else "prompts")
    ]
    for name, tier in report.tiers.items():
        line = f"TierKV: {name}: {size(tier.capacity_bytes)}, {tier.capacity_chunks:,} chunks"
        if tier.recovered_chunks:
            line += (
                f", {tier.recovered_chunks:,} of them ({size(tier.recovered_bytes)}) recovered in "
                f"{tier.seconds * 1e3:.0f} ms"
            )
        lines.append("; ".join((line, *tier.notes)))
    lines += [f"TierKV: {name} is left out: {why}" for name, why in report.disabled.items()]
    return lines


def size(nbytes: int) -> str:
    """Bytes for people: 2.81 MiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def _check(ranks: list[WorkerFacts], world_size: int) -> None:
    for fact in ranks:
        if fact.refusal:
            raise UnsupportedError(fact.refusal)
    if len(ranks) != world_size:
        raise UnsupportedError(f"{len(ranks)} of {world_size} workers reported")
    sizes = {fact.block_bytes for fact in ranks}
    if len(sizes) > 1:
        raise UnsupportedError(f"workers hold blocks of different sizes: {sorted(sizes)} bytes")


def _regions(ranks: list[WorkerFacts]) -> list[RegionHandle]:
    return [fact.region for fact in ranks if fact.region is not None]


def _fields(ranks: list[WorkerFacts]) -> dict[str, str]:
    """The workers' facts; once if they are all the same, else by rank."""
    if all(fact.fields == ranks[0].fields for fact in ranks):
        return dict(ranks[0].fields)
    return {
        f"{rank}.{name}": value
        for rank, fact in enumerate(ranks)
        for name, value in fact.fields.items()
    }
