# SPDX-License-Identifier: Apache-2.0
"""Whether answers survive: facts hidden in documents, asked for, by exact match.

    python -m benchmarks.blend_answers [--questions 48] [--seed 5] [--mode balanced] [--json F]

Each document holds one made-up fact ("The secret number of Oslo is 4821.") at a random place. A
prompt is five documents in random order and a question about one of them; right is the number,
digit for digit. Asked of vLLM without TierKV, of TierKV in each blend mode, whose donors are what
serving other prompts has left, and of TierKV in full: last, since what is computed in full is in
vLLM's own prefix cache, and nothing would be blended any more. The seed also decides which texts
are the documents: measure with another one than was tuned with.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.blend_rig import ask, blended_share, serve
from tierkv.demo.client import Client
from tierkv.demo.model import prepare_model

PLACES = [
    *("Oslo", "Lima", "Cairo", "Paris", "Quito", "Delhi", "Tokyo", "Rome", "Accra", "Sofia"),
    *("Berlin", "Madrid", "Dublin", "Vienna", "Athens", "Lisbon", "Prague", "Warsaw", "Ankara"),
    *("Havana", "Nairobi", "Jakarta", "Bogota", "Caracas", "Geneva", "Munich", "Milan", "Seoul"),
    *("Boston", "Dakar", "Riga", "Hanoi", "Manila", "Sydney", "Toronto", "Lagos"),
]
DOCUMENT_TOKENS = 320
IN_A_PROMPT = 5


def documents(client: Client, rng: random.Random) -> list[tuple[list[int], str, str]]:
    """(token ids, place, number) of each document."""
    from pydoc_data.topics import topics

    found: list[tuple[list[int], str, str]] = []
    for name in rng.sample(sorted(topics), len(topics)):
        place, number = PLACES[len(found)], str(rng.randint(1000, 9999))
        lines = topics[name].splitlines()[:60]
        at = rng.randint(8, 14)
        lines.insert(at, f"The secret number of {place} is {number}.")
        tokens = client.tokens("\n".join(lines))[:DOCUMENT_TOKENS]
        fact_end = len(client.tokens("\n".join(lines[: at + 1])))
        if fact_end < len(tokens) == DOCUMENT_TOKENS:
            found.append((tokens, place, number))
        if len(found) == len(PLACES):
            return found
    raise SystemExit("this Python's documentation is too short")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--seed", type=int, default=5, help="of documents, facts and prompts")
    parser.add_argument("--mode", action="append", default=[], help="may be repeated; all without")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    model = args.model or prepare_model(say)
    modes = args.mode or ["fast", "balanced", "quality"]
    rng = random.Random(args.seed)
    right: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        say("starting two servers")
        alone = serve(stack, "vllm-alone", model, Path(name), mode=None)
        tierkv = serve(stack, "tierkv", model, Path(name), mode="on_request")
        docs = documents(alone, rng)
        order = rng.sample(range(len(docs)), len(docs))
        for begin in range(0, len(order), 4):
            ask(tierkv, [t for index in order[begin : begin + 4] for t in docs[index][0]])
        for number in range(args.questions):
            picked = rng.sample(range(len(docs)), IN_A_PROMPT)
            _, place, wanted = docs[rng.choice(picked)]
            question = f"\n\nQuestion: What is the secret number of {place}?\nAnswer: The secret "
            question += f"number of {place} is"
            tokens = [t for index in picked for t in docs[index][0]] + alone.tokens(question)
            nothing: dict[str, Any] = {"blend": "off", "save": False}
            asked: list[tuple[str, Client, dict[str, Any]]] = [
                ("without TierKV", alone, {}),
                *((mode, tierkv, {"blend": mode, "save": False}) for mode in modes),
                ("in full", tierkv, nothing),
            ]
            for way, client, options in asked:
                text = ask(client, tokens, options, answer=8).text
                right[way] = right.get(way, 0) + text.strip().startswith(wanted)
            say(f"question {number + 1} of {args.questions}: {right}")
        share = blended_share(tierkv, args.questions * len(modes))
    result = {
        "questions": args.questions,
        "seed": args.seed,
        "right": right,
        "blended_share": share,
        "over_full": {mode: right[mode] / max(1, right["in full"]) for mode in modes},
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
