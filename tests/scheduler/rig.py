# SPDX-License-Identifier: Apache-2.0
"""vLLM's real scheduler and TierKV's real connector around a model that needs no weights.

The model's KV of a token is a formula of all tokens up to it, so that every byte in every block can
be foretold, and before each step the rig checks all that the step is about to attend to. A wrong
byte from any tier, a block copied too late or overwritten too early, fails the test where it
happens. The next token is a formula too: outputs are known without running anything.

Steps call the connector in the order of vLLM's model runner V1, with pickled metadata as between
its processes; several ranks are merged by vLLM's own aggregator.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tierkv_vllm.connector import TierKVConnector
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

VOCAB = 1000
LAYERS = 3
"""In each KV cache group."""
HEADS = 2
HEAD_SIZE = 8
EOS = VOCAB - 1


def prefix_states(tokens: Sequence[int]) -> list[int]:
    """One number for each position that depends on every token up to it."""
    state, states = 17, []
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % 2_147_483_647
        states.append(state)
    return states


def next_token(state: int) -> int:
    """What the model says after the position with this state; never the end token."""
    return state % (VOCAB - 1)


def expected_output(prompt: Sequence[int], count: int) -> list[int]:
    """The model's answer, computed without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(prefix_states(tokens)[-1]))
    return tokens[len(prompt) :]


def kv_of(states: Sequence[int], layer: int, rank: int, heads: int = HEADS) -> torch.Tensor:
    """KV bytes of some tokens in one layer. int8 [tokens, heads, 2 * HEAD_SIZE]."""
    base = torch.arange(heads * 2 * HEAD_SIZE) * 7 + 131 * layer + 1009 * rank
    bytes_ = (base[None, :] + torch.tensor(states)[:, None] % 65_521) % 251 - 125
    return bytes_.to(torch.int8).reshape(-1, heads, 2 * HEAD_SIZE)


def write_model(folder: Path) -> Path:
    """A configuration that vLLM accepts as a small Llama; there are no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "eos_token_id": EOS,
        "bos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class GroupShape:
    """One KV cache group of the rig's model.

    Attributes:
        block_size: tokens in a block; times `heads` it must be the same in all groups.
        window: tokens that its layers look back over, the current one included; None: all.
        heads: KV heads of its layers.
    """

    block_size: int = 16
    window: int | None = None
    heads: int = HEADS

    def spec(self) -> FullAttentionSpec | SlidingWindowSpec:
        sizes: dict[str, Any] = {
            "block_size": self.block_size,
            "num_kv_heads": self.heads,
            "head_size": HEAD_SIZE,
            "dtype": torch.int8,
        }
        if self.window is None:
            return FullAttentionSpec(**sizes)
        return SlidingWindowSpec(**sizes, sliding_window=self.window)

    def lowest(self, computed: int) -> int:
        """First position that the next token's attention reads."""
        return 0 if self.window is None else max(0, computed + 1 - self.window)


@dataclass
class _Running:
    """A worker's view of one request; blocks by group."""

    tokens: list[int]
    blocks: list[list[int]]
    computed: int


@dataclass
class Rig:
    """One engine.

    Attributes:
        model: folder of `write_model`.
        extra: TierKV's configuration, as in `kv_connector_extra_config`; None runs without it.
        num_blocks: engine blocks; 0 is vLLM's null block.
        groups: KV cache groups; one of full attention with `block_size` if empty.
        max_tokens: tokens of one step.
        replicas: consecutive ranks that hold the same KV.
        queries, hits: prompt tokens by vLLM's own count of what it asked the connector for.
    """

    model: Path
    extra: dict[str, Any] | None
    num_blocks: int = 64
    block_size: int = 16
    groups: tuple[GroupShape, ...] = ()
    max_tokens: int = 128
    max_seqs: int = 8
    ranks: int = 1
    replicas: int = 1
    prefix_caching: bool = True
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    steps: int = 0
    preemptions: int = 0
    queries: int = 0
    hits: int = 0

    def __post_init__(self) -> None:
        self.groups = self.groups or (GroupShape(self.block_size),)
        sizes = [group.block_size for group in self.groups]
        self.block_size, hash_block_size = math.lcm(*sizes), math.gcd(*sizes)
        self.config = self._vllm_config()
        self.kv_cache_config = self._kv_cache_config()
        self.caches = [self._caches() for _ in range(self.ranks)]
        self.workers: list[TierKVConnector] = []
        if self.extra is not None:
            self._make_workers()
        init_none_hash(sha256)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=self.block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.connector = self.scheduler.get_kv_connector()
        if self.connector is not None:
            self.connector.set_xfer_handshake_metadata_pp_aware(
                {
                    (0, rank): pickle.loads(pickle.dumps(worker.get_handshake_metadata()))
                    for rank, worker in enumerate(self.workers)
                }
            )
        self.hasher = get_request_block_hasher(hash_block_size, sha256)
        self.aggregator = KVOutputAggregator(self.ranks)
        self.running: dict[str, _Running] = {}

    def _make_workers(self) -> None:
        """vLLM makes the workers' instances first; here one after the other, writers first."""
        told: list[Any] = []

        def gather(handle: Any) -> list[Any]:
            told.append(handle)
            return told + [None] * (self.ranks - len(told))

        with mock.patch("tierkv_vllm.replicas._gather_in_tp_group", gather):
            for rank, cache in enumerate(self.caches):
                self.config.parallel_config.rank = rank
                worker = TierKVConnector(self.config, KVConnectorRole.WORKER, self.kv_cache_config)
                worker.register_kv_caches(cache)
                self.workers.append(worker)

    def _vllm_config(self) -> VllmConfig:
        transfer = None
        if self.extra is not None:
            transfer = KVTransferConfig(
                kv_connector="TierKVConnector",
                kv_connector_module_path="tierkv_vllm",
                kv_role="kv_both",
                kv_connector_extra_config=self.extra,
            )
        model = ModelConfig(model=str(self.model), dtype="bfloat16", skip_tokenizer_init=True)
        cache = CacheConfig(block_size=self.block_size, enable_prefix_caching=self.prefix_caching)
        cache.num_gpu_blocks = self.num_blocks
        config = VllmConfig(
            model_config=model,
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=self.max_seqs,
                max_num_batched_tokens=self.max_tokens,
                max_model_len=4096,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=False,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=transfer,
        )
        # One process plays all ranks; only the number matters to the connector.
        config.parallel_config.world_size = self.ranks
        config.cache_config.block_size = self.block_size
        return config

    def _layer_names(self, group: int) -> list[str]:
        first = group * LAYERS
        return [f"model.layers.{i}.self_attn.attn" for i in range(first, first + LAYERS)]

    def _kv_cache_config(self) -> KVCacheConfig:
        (page,) = {group.spec().page_size_bytes for group in self.groups}
        # Groups lie over each other, as in vLLM: a block belongs to one of them at a time.
        return KVCacheConfig(
            num_blocks=self.num_blocks,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=page * LAYERS * self.num_blocks,
                    layers=self._layer_names(g),
                    layer_stride=page * self.num_blocks,
                    block_stride=page,
                )
                for g in range(len(self.groups))
            ],
            kv_cache_groups=[
                KVCacheGroupSpec(self._layer_names(g), group.spec())
                for g, group in enumerate(self.groups)
            ],
            kv_cache_layout="LBHNC",
            kv_tp_replicas=self.replicas,
        )

    def _caches(self) -> dict[str, torch.Tensor]:
        page = self.groups[0].spec().page_size_bytes
        whole = torch.full((LAYERS, self.num_blocks, page), 99, dtype=torch.int8)
        return {
            name: whole[i].view(-1, group.heads, group.block_size, 2 * HEAD_SIZE)
            for g, group in enumerate(self.groups)
            for i, name in enumerate(self._layer_names(g))
        }

    # Driving it

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        salt: str | None = None,
        params: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> Request:
        """Queue a request."""
        extra_args = {"kv_transfer_params": params} if params is not None else None
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args, **sampling
            ),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self.hasher,
        )
        self.outputs[request_id] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """One engine step, checks included."""
        self.steps += 1
        plan = self.scheduler.schedule()
        self.preemptions += len(plan.preempted_req_ids or ())
        outputs = [self._execute(plan, rank) for rank in range(self.ranks)]
        merged = self.aggregator.aggregate(outputs) if self.ranks > 1 else outputs[0]
        assert merged is not None
        for client in self.scheduler.update_from_output(plan, merged).values():
            if client.scheduler_stats is not None:
                seen = client.scheduler_stats.connector_prefix_cache_stats
                self.queries += seen.queries
                self.hits += seen.hits
            for item in client.outputs:
                self.outputs[item.request_id] += item.new_token_ids
                if item.finish_reason is not None:
                    self.finished.add(item.request_id)
        return plan

    def run(self, limit: int = 2000) -> None:
        """Step until nothing is left to do, for requests and for the connector."""
        for _ in range(limit):
            if not self.busy():
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps: {self.scheduler.requests.keys()}")

    def busy(self) -> bool:
        return (
            self.scheduler.has_unfinished_requests()
            or self.scheduler.has_finished_requests()
            or (self.connector is not None and self.connector.has_pending_push_work())
        )

    def generate(
        self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **kw: Any
    ) -> None:
        """Run one request to its end and check its answer."""
        self.add(request_id, prompt, max_tokens, **kw)
        self.run()
        assert self.outputs[request_id] == expected_output(prompt, max_tokens)

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    # One rank's part of a step

    def _execute(self, plan: SchedulerOutput, rank: int) -> ModelRunnerOutput:
        worker = self.workers[rank] if self.workers else None
        metadata = pickle.loads(pickle.dumps(plan.kv_connector_metadata))
        if worker is not None:
            worker.handle_preemptions(metadata)
        if rank == 0:
            self._update_states(plan)
        if worker is not None:
            worker.bind_connector_metadata(metadata)
        sampled = self._forward(plan, rank)
        connector_output = None
        if worker is not None:
            worker.start_load_kv(None)
            worker.wait_for_save()
            results = worker.get_transfer_results(plan.finished_req_ids)
            connector_output = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            worker.clear_connector_metadata()
        ids = list(plan.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[sampled.get(request_id, []) for request_id in ids],
            kv_connector_output=connector_output,
        )

    def _update_states(self, plan: SchedulerOutput) -> None:
        for request_id in plan.finished_req_ids:
            self.running.pop(request_id, None)
        for new in plan.scheduled_new_reqs:
            known = self.scheduler.requests[new.req_id]
            self.running[new.req_id] = _Running(
                list(known.all_token_ids),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
            )
        cached = plan.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            state = self.running[request_id]
            blocks = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                state.blocks = [list(ids) for ids in blocks]
            elif blocks is not None:
                for have, ids in zip(state.blocks, blocks, strict=True):
                    have += ids
            state.tokens = list(self.scheduler.requests[request_id].all_token_ids)
            state.computed = cached.num_computed_tokens[i]

    def _forward(self, plan: SchedulerOutput, rank: int) -> dict[str, list[int]]:
        sampled = {}
        # Replicas compute the same; `rank` only names the caches from here on.
        part = rank // self.replicas
        for request_id, count in plan.num_scheduled_tokens.items():
            state = self.running[request_id]
            states = prefix_states(state.tokens)
            self._check(request_id, state, states, rank)
            end = state.computed + count
            for g, group in enumerate(self.groups):
                blocks, offsets = self._places(state, g, state.computed, end)
                for layer, cache in self._layers(g, rank):
                    kv = kv_of(states[state.computed : end], layer, part, group.heads)
                    cache[blocks, :, offsets] = kv
            if state.computed + count == len(state.tokens):
                sampled[request_id] = [next_token(states[-1])]
        return sampled

    def _layers(self, group: int, rank: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The layers of a group, by number, with their KV."""
        for i, name in enumerate(self._layer_names(group)):
            yield group * LAYERS + i, self.caches[rank][name]

    def _check(self, request_id: str, state: _Running, states: list[int], rank: int) -> None:
        """All KV that this step attends to is what these tokens in this order give."""
        for g, group in enumerate(self.groups):
            lowest = group.lowest(state.computed)
            if lowest == state.computed:
                continue
            blocks, offsets = self._places(state, g, lowest, state.computed)
            assert bool((blocks != 0).all()), f"{request_id}: group {g}: KV in the null block"
            for layer, cache in self._layers(g, rank):
                part = rank // self.replicas
                wanted = kv_of(states[lowest : state.computed], layer, part, group.heads)
                wrong = (cache[blocks, :, offsets] != wanted).flatten(1).any(dim=1).nonzero()
                if len(wrong):
                    place = int(wrong[0])
                    raise AssertionError(
                        f"wrong KV: {request_id}, step {self.steps}, group {g}, layer {layer}, "
                        f"position {lowest + place} of {state.computed}, block "
                        f"{int(blocks[place])}, rank {rank}"
                    )

    def _places(
        self, state: _Running, group: int, begin: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset of each position in a group."""
        positions = torch.arange(begin, end)
        size = self.groups[group].block_size
        return torch.tensor(state.blocks[group])[positions // size], positions % size
