# SPDX-License-Identifier: Apache-2.0
"""What the demo measures and with which settings: all sizes in one place.

Every server gets the same settings but for two things: how many blocks vLLM keeps for itself, and
whether TierKV is attached.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tierkv.demo.client import MODEL

BLOCK_TOKENS = 128
"""vLLM's default on CPU, and so the chunk size of TierKV there."""
BLOCKS_CACHED = 20
"""Whole blocks in a document: 2,560 tokens."""
MAX_MODEL_TOKENS = (BLOCKS_CACHED + 2) * BLOCK_TOKENS
DOCUMENTS_THAT_FIT = 2
"""In vLLM's own KV space where it is small: cycling through more of them finds none of them."""
KV_SPACE_LIMIT = 1 << 30
"""Bytes. Only keeps vLLM from sizing its space by the machine; the number of blocks decides."""

CONFIG = """\
version: 1
tiers:
  - {{type: dram, capacity: 2GiB}}
  - {{type: disk, path: {path}, capacity: 2GiB}}
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        documents: measured ones; one more is the warm-up, and its figures are thrown away.
        rounds: how often each document is asked about while TierKV holds it in DRAM.
        restarts: how often the server is stopped and started to read from disk.
        answer_tokens: length of each answer.
    """

    documents: int
    rounds: int
    restarts: int
    answer_tokens: int

    @property
    def requests(self) -> int:
        """Requests in all, warm-ups included."""
        cold, fill, warm, disk = 2, 1, 2 * self.rounds, 2 * self.restarts
        return (self.documents + 1) * (cold + fill + warm + disk)

    @property
    def starts(self) -> int:
        """Servers started in all."""
        return 3 + self.restarts


FULL = Plan(documents=8, rounds=3, restarts=1, answer_tokens=24)
QUICK = Plan(documents=5, rounds=2, restarts=1, answer_tokens=16)


def small_space() -> int:
    """Blocks of a KV space in which the documents do not fit; one block is vLLM's own."""
    return 1 + DOCUMENTS_THAT_FIT * (BLOCKS_CACHED + 1)


def large_space(plan: Plan) -> int:
    """Blocks of a KV space in which all documents and answers fit."""
    return 1 + (plan.documents + 2) * (BLOCKS_CACHED + 1 + plan.rounds)


SHARED_ARGUMENTS = (
    *("--served-model-name", MODEL),
    # Compiling takes longer than the whole demo; it is off for everybody.
    "--enforce-eager",
    *("--block-size", str(BLOCK_TOKENS)),
    *("--max-model-len", str(MAX_MODEL_TOKENS)),
    # A prompt is computed in one piece in every phase.
    *("--max-num-batched-tokens", str(MAX_MODEL_TOKENS)),
    *("--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(KV_SPACE_LIMIT)),
    "--enable-prompt-tokens-details",
)
"""Arguments of `vllm serve` that all servers get."""


def vllm_arguments(model: Path, blocks: int) -> list[str]:
    """Arguments of `vllm serve` for a server with `blocks` blocks of its own."""
    return [str(model), *SHARED_ARGUMENTS, "--num-gpu-blocks-override", str(blocks)]


def tierkv_arguments(config: Path) -> list[str]:
    """What attaches TierKV to a server: the one argument that a user adds."""
    transfer = {
        "kv_connector": "TierKVConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": str(config)},
    }
    return ["--kv-transfer-config", json.dumps(transfer)]


def write_config(folder: Path) -> Path:
    """Write `tierkv.yaml` with the disk tier in `folder/disk`; returns its path."""
    config = folder / "tierkv.yaml"
    # A JSON string is a YAML string, and $$ is a dollar: no character of the path means anything.
    path = json.dumps(str(folder / "disk")).replace("$", "$$")
    config.write_text(CONFIG.format(path=path), encoding="utf-8")
    return config
