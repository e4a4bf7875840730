# SPDX-License-Identifier: Apache-2.0
"""Engines for tests, each in a process of its own that starts in a few seconds.

Importing vLLM takes longer than starting a small engine. So one server process imports it once,
and every engine is forked from that (Python's "forkserver"; it has no thread when it forks). Each
engine computes with one thread: OpenMP teams that share cores with other processes wait for each
other for most of their time.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from tests.engine.host import Answer, Host, Prompt, serve

BLOCK = 32
"""Tokens in an engine block."""
CHUNK = 64
"""Tokens in a chunk: TierKV's default for this block size."""
ANSWER = 6
"""Tokens of an answer, unless a test wants another number of them."""

CPUS = sorted(os.sched_getaffinity(0))
REFERENCE_CPU = {"VLLM_CPU_OMP_THREADS_BIND": str(CPUS[0])}
"""References compute while engines under test do: on another CPU, if there is one."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": str(CPUS[-1]),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
PRELOADED = [
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "tierkv_vllm.connector",
    "tierkv_vllm.opening",
    "tierkv_vllm.worker",
]

T = TypeVar("T")


class EngineError(AssertionError):
    """The engine did not start, or what it was told to do raised; holds the traceback."""


class Engine:
    """An engine in a process of its own. Blocks until it serves.

    Args:
        options: of `vllm.LLM`.
        log: file for everything the process prints.
        environment: variables on top of `ENVIRONMENT`.

    Raises:
        EngineError: it did not start.

    Attributes:
        pid: of the process; with vLLM's engine core in it, the one that holds the disk tier.
    """

    def __init__(
        self, options: Mapping[str, Any], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        # OpenMP reads its variables when it is loaded, in the server process.
        with mock.patch.dict(os.environ, ENVIRONMENT):
            forkserver.ensure_running()
        self._log = log
        self._connection, other = context.Pipe()
        wanted = {**ENVIRONMENT, **(environment or {})}
        self._process = context.Process(target=serve, args=(other, log, wanted, dict(options)))
        self._process.start()
        other.close()
        try:
            self.pid: int = self.result()
        except BaseException:
            self.kill()
            raise

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function(host, *arguments)` over there; a module's function, not a nested one."""
        self.begin(function, *arguments)
        return self.result()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """The same, but do not wait: `result` follows."""
        self._connection.send((function, arguments))

    def result(self) -> Any:
        """What the last `begin` gave."""
        try:
            ok, value = self._connection.recv()
        except EOFError:
            raise EngineError(f"the engine died; its log ends:\n{self.log[-3000:]}") from None
        if not ok:
            raise EngineError(value)
        return value

    def generate(
        self,
        prompts: Sequence[Prompt],
        count: int = ANSWER,
        params: Mapping[str, Any] | None = None,
    ) -> list[Answer]:
        """See `Host.generate`."""
        return self.run(Host.generate, prompts, count, params)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache; TierKV's stays."""
        self.run(Host.forget)

    @property
    def log(self) -> str:
        """Everything the process has printed so far."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """Shut the engine down in order and end its process."""
        if not self._connection.closed:
            try:
                self.run(Host.close)
                self._connection.close()
                self._process.join(60)
            finally:
                self.kill()

    def kill(self) -> None:
        """End the process and vLLM's own, if they are still there. Idempotent."""
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            assert self._process.pid is not None
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()


def options(model: Path, tierkv: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Options of a small engine in float32.

    Args:
        model: its directory.
        tierkv: configuration; None leaves TierKV away.
        changes: to vLLM's options.
    """
    chosen: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "seed": 0,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 100,
        "max_model_len": 2560,
        "max_num_seqs": 8,
        # Only keeps vLLM from sizing its memory by the machine; the number of blocks decides.
        "kv_cache_memory_bytes": 1 << 30,
    }
    if tierkv is not None:
        chosen["kv_transfer_config"] = {
            "kv_connector": "TierKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": dict(tierkv),
        }
    return chosen | changes


def tiers(dram: str, *lower: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """TierKV's configuration: DRAM, and what lies below."""
    return {"version": 1, "tiers": [{"type": "dram", "capacity": dram}, *lower], **more}


def disk(path: Path, capacity: str = "1GiB", **more: Any) -> dict[str, Any]:
    """A disk tier for a machine that is busy with other things: never late."""
    return {
        "type": "disk",
        "path": str(path),
        "capacity": capacity,
        "min_free": "1MiB",
        "load_deadline": "5m",
        "save_deadline": "5m",
        **more,
    }


def hit(length: int, stored: int | None = None) -> int:
    """Cached tokens of a prompt whose first `stored` tokens (all, if None) were computed before.

    Whole chunks are stored; a hit ends at the last block boundary before the last token.
    """
    common = length if stored is None else min(stored, length)
    return min(common // CHUNK * CHUNK, (length - 1) // BLOCK * BLOCK)


class Reference:
    """The right answers: vLLM alone, one prompt at a time, without any cache.

    Args:
        engine: without TierKV and without prefix caching.
    """

    LEAST_MARGIN = 1e-3
    """Rounding in float32 moves log probabilities by about 1e-5. Prompts for which less than this
    decides would make a test of rounding out of a test of TierKV."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    @contextlib.contextmanager
    def meanwhile(self, prompts: Sequence[Prompt], count: int = ANSWER) -> Iterator[None]:
        """Compute answers while the block does something else."""
        lacking = [p for p in prompts if (tuple(p), count) not in self._known]
        self._engine.begin(one_by_one, lacking, count)
        try:
            yield
        finally:
            answers = self._engine.result()
        for prompt, answer in zip(lacking, answers, strict=True):
            assert answer.margin > self.LEAST_MARGIN, (
                f"rounding decides the answer to the prompt of {len(prompt)} tokens that begins "
                f"with {list(prompt[:4])} (margin {answer.margin}); choose another one"
            )
            self._known[tuple(prompt), count] = answer.tokens

    def forget(self) -> None:
        """Do not remember answers any longer: for those who ask without end."""
        self._known.clear()

    def tokens(self, prompts: Sequence[Prompt], count: int = ANSWER) -> list[tuple[int, ...]]:
        """The right tokens for each prompt."""
        with self.meanwhile(prompts, count):
            pass
        return [self._known[tuple(prompt), count] for prompt in prompts]


def one_by_one(host: Host, prompts: Sequence[Prompt], count: int) -> list[Answer]:
    return [host.generate([prompt], count, margins=True)[0] for prompt in prompts]


def tokens_of(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def cached_of(answers: Sequence[Answer]) -> list[int]:
    return [answer.cached for answer in answers]
