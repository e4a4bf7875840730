# SPDX-License-Identifier: Apache-2.0
"""What reuse of any text gains: time to the first token of prompts of shuffled documents.

    python -m benchmarks.blend_ttft [--requests 200] [--mode balanced --mode fast] [--json F]

Two `vllm serve` side by side, asked the same prompts in turns over HTTP: one with TierKV as it is
(prefixes only, and vLLM's own prefix cache on), one that blends as well. Each prompt is a random
choice of documents in random order and a question; no two prompts share a long prefix. The blending
server is asked all of them: its last ones show whether reuse decays. The mode is a request's own
choice, so one server serves all modes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.blend_rig import ask, blended_share, serve
from tierkv.demo.client import Client
from tierkv.demo.figures import Spread
from tierkv.demo.model import prepare_model

DOCUMENTS = 24
DOCUMENT_TOKENS = 500
QUIET_S = 1.2
"""vLLM's processes spin for a second after their last message."""
QUESTION = "\n\nQuestion: What is the text above about?\nAnswer:"


def documents(client: Client) -> list[list[int]]:
    """Token ids of pieces of Python's own documentation, each of the same length."""
    from pydoc_data.topics import topics

    found: list[list[int]] = []
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        ids = client.tokens(topics[name])
        for begin in range(0, min(len(ids), 4 * DOCUMENT_TOKENS), DOCUMENT_TOKENS):
            piece = ids[begin : begin + DOCUMENT_TOKENS]
            if len(piece) == DOCUMENT_TOKENS:
                found.append(piece)
        if len(found) >= DOCUMENTS:
            return found[:DOCUMENTS]
    raise SystemExit("this Python's documentation is too short")


def figures(values: list[float]) -> dict[str, float]:
    return asdict(Spread.of(values))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--compared", type=int, default=16, help="of them also asked without")
    parser.add_argument("--documents", type=int, default=14, help="in a prompt, of 500 tokens each")
    parser.add_argument("--mode", action="append", default=[])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    modes = args.mode or ["fast", "balanced", "quality"]
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    model = args.model or prepare_model(say)
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        say("starting two servers")
        plain = serve(stack, "prefixes", model, folder, mode="off")
        blending = serve(stack, "blending", model, folder, mode="on_request")
        docs = documents(plain)
        question = plain.tokens(QUESTION)

        def prompt() -> list[int]:
            picked = rng.sample(range(len(docs)), args.documents)
            return [t for index in picked for t in docs[index]] + question

        say("serving each document twice, among others")
        for _ in range(2):
            order = rng.sample(range(len(docs)), len(docs))
            for begin in range(0, len(order), 4):
                ids = [t for index in order[begin : begin + 4] for t in docs[index]]
                ask(blending, ids + question)
        for mode in modes:
            ask(blending, prompt(), {"blend": mode})
        result: dict[str, Any] = {"ratios": {}, "modes": {}}
        for mode in modes:
            without, with_, gains, cached = [], [], [], []
            for _ in range(args.compared):
                tokens = prompt()
                time.sleep(QUIET_S)
                slow = ask(plain, tokens).ttft_s
                time.sleep(QUIET_S)
                answer = ask(blending, tokens, {"blend": mode})
                without.append(slow)
                with_.append(answer.ttft_s)
                gains.append(slow / answer.ttft_s)
                cached.append(answer.cached_tokens / answer.prompt_tokens)
            result["modes"][mode] = {
                "ttft_without_s": figures(without), "ttft_with_s": figures(with_),
                "gain": figures(gains), "cached_share": statistics.mean(cached),
                "prompt_tokens": len(tokens),
            }  # fmt: skip
            result["ratios"][f"blend_ttft_gain_{mode}"] = statistics.median(gains)
            say(f"{mode}: {result['modes'][mode]}")
        say(f"{args.requests} requests in a row")
        times = [ask(blending, prompt(), {"blend": modes[-1]}).ttft_s for _ in range(args.requests)]
        asked = len(modes) * (1 + args.compared) + args.requests
        result["blended_share"] = blended_share(blending, asked)
        quarter = max(1, min(50, args.requests // 4))
        first, last = times[:quarter], times[-quarter:]
        result["decay"] = {"first_s": figures(first), "last_s": figures(last)}
        result["ratios"]["blend_last_over_first"] = statistics.median(last) / statistics.median(
            first
        )
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
