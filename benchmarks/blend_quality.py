# SPDX-License-Identifier: Apache-2.0
"""What reuse of any text loses, and what the published methods lose under the same conditions.

    python benchmarks/blend_quality.py [--prompts 24] [--json F] [--plot F.svg]

A real model inside a real vLLM worker. Each prompt is 3 to 8 real documents in random order and the
beginning of a continuation; scored are the next tokens of the continuation, given in turn: KL
divergence of the blended model's next-token distribution from the full computation's, in nats, and
how often both find the same token most likely.

Donors are of two kinds. `served`: as ordinary serving leaves them, each document first seen behind
0 to 3 other documents. `alone`: computed by itself behind one token that is dropped, as CacheBlend
and EPIC do. Both are turned to their new positions. The baselines:

    CacheBlend   alone; 15 % of tokens, those whose values at layer 1 deviate most; the layers up to
                 there are computed afresh for all tokens
    EPIC         alone; the first 16 or 32 tokens of each document

The engine's pages play no part here: that blended pages say the same is tests/engine/test_blend.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from tierkv_vllm.blend.drift import Drift
from tierkv_vllm.blend.forward import Scratch, attended, choose, recompute
from tierkv_vllm.blend.model import BlendModel
from tierkv_vllm.model_watch import model_runner, watch
from torch import Tensor

from tierkv.blend.match import Run
from tierkv.blend.plan import MODES, QUERY_TOKENS, BlendPlan, Mode, make_plan
from tierkv.demo.model import prepare_model

DOCUMENT_TOKENS = (300, 600)
SCORED_TOKENS = 96
PIECES_OF_A_TOPIC = 3
CACHEBLEND_SHARE = 0.15
CHECK_LAYER = 1


@dataclass(frozen=True, slots=True)
class Document:
    tokens: list[int]
    continuation: list[int]


@dataclass(slots=True)
class Donor:
    """A document's KV as it was computed somewhere, and where."""

    keys: Tensor
    values: Tensor
    start: int


@dataclass(slots=True)
class Score:
    """Of one method, one value a prompt."""

    kl: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Stop(Exception):
    """The check layer has been reached."""


class Lab:
    """A model in a vLLM worker of this process."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        watch()
        from vllm import LLM

        self.llm = LLM(
            str(model_dir),
            enforce_eager=True,
            dtype=dtype,
            block_size=128,
            max_model_len=8192,
            kv_cache_memory_bytes=1 << 28,
            max_num_seqs=4,
        )
        runner: Any = model_runner()
        layers = runner.vllm_config.compilation_config.static_forward_context
        caches = {name: layer.kv_cache for name, layer in layers.items()}
        self.model = BlendModel(runner.vllm_config, caches)
        self.tokenizer = self.llm.get_tokenizer()

    def full(self, tokens: Tensor) -> tuple[Scratch, Tensor]:
        """All tokens computed; hidden states too."""
        scratch = Scratch(self.model, len(tokens))
        hidden = recompute(self.model, scratch, tokens, torch.arange(len(tokens)))
        return scratch, hidden

    def values_at_check_layer(self, tokens: Tensor, into: Scratch) -> Tensor:
        """Fresh values of layer 1; keys and values up to there go into the scratch."""

        def stop(layer: int) -> None:
            if layer == CHECK_LAYER:
                raise Stop

        with suppress(Stop):
            recompute(self.model, into, tokens, torch.arange(len(tokens)), after_layer=stop)
        return into.layer(CHECK_LAYER)[1].float().clone()


def documents(lab: Lab, count: int, rng: random.Random) -> list[Document]:
    """Pieces of Python's own documentation, at most three of a topic."""
    from pydoc_data.topics import topics

    found = []
    for name in sorted(topics):
        ids = lab.tokenizer(topics[name], add_special_tokens=False).input_ids
        for _ in range(PIECES_OF_A_TOPIC):
            length = rng.randint(*DOCUMENT_TOKENS)
            more = QUERY_TOKENS + SCORED_TOKENS
            if len(ids) >= length + more:
                found.append(Document(ids[:length], ids[length : length + more]))
            ids = ids[length + more :]
    rng.shuffle(found)
    if len(found) < count:
        raise SystemExit(f"only {len(found)} documents are long enough")
    return found[:count]


def served_donors(lab: Lab, docs: list[Document], rng: random.Random) -> list[Donor]:
    """Each document as the last of one to four in a prompt."""
    donors = []
    for index, doc in enumerate(docs):
        others = rng.sample([d for i, d in enumerate(docs) if i != index], rng.randint(0, 3))
        before = [t for other in others for t in other.tokens]
        donors.append(donor_behind(lab, before, doc))
    return donors


def donor_behind(lab: Lab, before: list[int], doc: Document) -> Donor:
    tokens = torch.tensor(before + doc.tokens)
    scratch = Scratch(lab.model, len(tokens))
    positions = torch.arange(len(tokens))
    recompute(lab.model, scratch, tokens, positions)
    start = len(before)
    return Donor(scratch.keys[:, start:].clone(), scratch.values[:, start:].clone(), start)


def assemble(
    lab: Lab, length: int, placed: list[tuple[int, Donor]], *, turn: bool = True
) -> Scratch:
    """A draft with each donor at its position."""
    scratch = Scratch(lab.model, length)
    for begin, donor in placed:
        end = begin + donor.keys.shape[1]
        scratch.keys[:, begin:end] = donor.keys
        scratch.values[:, begin:end] = donor.values
        if turn:
            for index, layer in enumerate(lab.model.layers):
                assert layer.rope is not None
                layer.rope.turn(scratch.layer(index)[0][:, begin:end], begin - donor.start)
    return scratch


@dataclass(slots=True)
class Case:
    """One prompt: its documents, the question (`query`) behind them, and what is scored."""

    tokens: Tensor
    begins: list[int]
    docs: list[int]
    context: int
    logp: Tensor
    seconds: float

    @property
    def query(self) -> Tensor:
        return torch.arange(self.context, self.context + QUERY_TOKENS)


def make_case(lab: Lab, docs: list[Document], rng: random.Random) -> Case:
    picked = rng.sample(range(len(docs)), rng.randint(3, 8))
    ids: list[int] = []
    begins = []
    for index in picked:
        begins.append(len(ids))
        ids += docs[index].tokens
    context = len(ids)
    tokens = torch.tensor(ids + docs[rng.choice(picked)].continuation)
    began = time.perf_counter()
    _, hidden = lab.full(tokens)
    seconds = time.perf_counter() - began
    logp = lab.model.logits(hidden[context + QUERY_TOKENS - 1 : -1]).log_softmax(-1)
    return Case(tokens, begins, picked, context, logp, seconds)


def score(
    lab: Lab,
    case: Case,
    scratch: Scratch,
    rows: Tensor,
    into: Score,
    began: float,
    drift: Drift | None,
) -> None:
    """Recompute the rows and the question, then run the scored tokens on top."""
    chosen = torch.cat([rows, case.query]).unique()
    correction = None if drift is None else drift.during(chosen, 0, case.context)
    recompute(lab.model, scratch, case.tokens, chosen, drift=correction)
    into.seconds.append((time.perf_counter() - began) / case.seconds)
    # As the engine would: what follows the prompt is computed over what was blended.
    last = case.context + QUERY_TOKENS - 1
    hidden = recompute(lab.model, scratch, case.tokens, torch.arange(last, len(case.tokens) - 1))
    logp = lab.model.logits(hidden).log_softmax(-1)
    into.kl.append(float((case.logp.exp() * (case.logp - logp)).sum(-1).mean()))
    into.top1.append(float((case.logp.argmax(-1) == logp.argmax(-1)).float().mean()))
    into.share.append(int((rows < case.context).sum()) / case.context)


def plan_of(case: Case, mode: Mode) -> BlendPlan:
    """As the planner makes it of a prompt up to the end of the question."""
    ends = [*case.begins[1:], case.context]
    runs = [Run(begin, end, 0, ()) for begin, end in zip(case.begins, ends, strict=True)]
    return make_plan(0, case.context + QUERY_TOKENS, runs, mode)


def anchored(case: Case, count: int) -> Tensor:
    """Rows of the first tokens of each document, and of the question."""
    return torch.from_numpy(plan_of(case, Mode(count, 0, 0.0)).fixed)


Method = Callable[[Case], None]


def methods(
    lab: Lab,
    docs: list[Document],
    served: list[Donor],
    alone: list[Donor],
    scores: dict[str, Score],
    modes: dict[str, Mode],
) -> Method:
    """Everything that is compared, on one prompt."""
    chance = torch.Generator().manual_seed(3)
    # Documents as earlier prompts have blended them: what serving never uses, to show why.
    second_hand, second_hand_alone = list(served), list(alone)

    def draft(case: Case, donors: list[Donor], *, turn: bool = True) -> Scratch:
        placed = [(b, donors[i]) for b, i in zip(case.begins, case.docs, strict=True)]
        return assemble(lab, len(case.tokens), placed, turn=turn)

    def add(
        name: str,
        case: Case,
        scratch: Scratch,
        rows: Tensor,
        began: float,
        drift: Drift | None = None,
    ) -> None:
        score(lab, case, scratch, rows, scores.setdefault(name, Score()), began, drift)

    def by_mode(
        name: str,
        mode: Mode,
        case: Case,
        donors: list[Donor],
        *,
        corrected: bool = True,
        at_random: bool = False,
    ) -> Scratch:
        scratch = draft(case, donors)
        began = time.perf_counter()
        plan = plan_of(case, mode)
        rows = torch.from_numpy(plan.fixed)
        if plan.extra:
            if at_random:
                mass = torch.rand((2, case.context), generator=chance)
            else:
                mass = attended(lab.model, scratch, case.tokens, case.query)
            rows = choose(mass[:, : case.context], rows[rows < case.context], 0, plan.extra)
        drift = None
        if corrected:
            parts = torch.from_numpy(plan.segments), torch.from_numpy(plan.samples)
            drift = Drift(lab.model, *parts)
        add(name, case, scratch, rows, began, drift)
        return scratch

    def keep(donors: list[Donor], case: Case, blended: Scratch) -> None:
        for begin, index in zip(case.begins, case.docs, strict=True):
            end = begin + len(docs[index].tokens)
            keys, values = blended.keys[:, begin:end], blended.values[:, begin:end]
            donors[index] = Donor(keys.clone(), values.clone(), begin)

    def cacheblend(name: str, case: Case, donors: list[Donor]) -> Scratch:
        scratch, began = draft(case, donors), time.perf_counter()
        old = scratch.layer(CHECK_LAYER)[1].float().clone()
        fresh = lab.values_at_check_layer(case.tokens, scratch)
        deviation = (fresh - old).pow(2).sum((0, 2))
        extra = round(CACHEBLEND_SHARE * case.context)
        rows = deviation[: case.context].topk(extra).indices.sort().values
        add(name, case, scratch, rows, began)
        return scratch

    def run(case: Case) -> None:
        now = time.perf_counter
        none = torch.empty(0, dtype=torch.int64)
        add("served, nothing recomputed", case, draft(case, served), none, now())
        add("served, keys not turned", case, draft(case, served, turn=False), none, now())
        for name, mode in modes.items():
            blended = by_mode(name, mode, case, served)
            if name in MODES:
                by_mode(f"{name}, not corrected", mode, case, served, corrected=False)
            if name == "balanced":
                by_mode("balanced, chosen at random", mode, case, served, at_random=True)
                by_mode("balanced, donors blended before", mode, case, second_hand)
                keep(second_hand, case, blended)
        for count in (8, 16, 32):
            rows = anchored(case, count)
            add(f"served, first {count}", case, draft(case, served), rows, now())
            if count > 8:
                add(f"EPIC {count} (alone)", case, draft(case, alone), rows, now())
        blended = cacheblend("CacheBlend 15 % (alone)", case, alone)
        cacheblend("CacheBlend 15 %, blended before", case, second_hand_alone)
        keep(second_hand_alone, case, blended)
        cacheblend("CacheBlend 15 % (served)", case, served)
        everything = torch.arange(case.context)
        add("control: all recomputed", case, draft(case, served), everything, now())
        add_same_history(case)

    def add_same_history(case: Case) -> None:
        """Donors with the very same text before them, at other positions: rounding alone."""
        moved = 1000
        scratch = Scratch(lab.model, len(case.tokens) + moved)
        # Rotary positions are relative: the same text 1,000 tokens later is the same text.
        tokens = torch.cat([case.tokens[:1].expand(moved), case.tokens])
        positions = torch.arange(moved, moved + case.context)
        recompute(lab.model, scratch, tokens, positions, first=moved)
        donor = Donor(
            scratch.keys[:, moved : moved + case.context],
            scratch.values[:, moved : moved + case.context],
            moved,
        )
        draft_ = assemble(lab, len(case.tokens), [(0, donor)])
        none = torch.empty(0, dtype=torch.int64)
        add("floor: same history, turned", case, draft_, none, time.perf_counter())

    return run


def ratio(above: Score, below: Score) -> dict[str, float]:
    """Of mean KL, with a bootstrapped 95 % interval over prompts."""
    rng = np.random.default_rng(0)
    a, b = np.array(above.kl), np.array(below.kl)
    picks = rng.integers(0, len(a), (2000, len(a)))
    spread = np.sort(a[picks].mean(1) / b[picks].mean(1))
    return {
        "value": float(a.mean() / b.mean()),
        "low": float(spread[50]),
        "high": float(spread[1949]),
    }


def plot(rows: dict[str, dict[str, Any]], file: Path) -> None:
    """KL against recomputed share: ours as a line, the others as marks."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    ours = [rows[name] for name in ("served, nothing recomputed", "fast", "balanced", "quality")]
    axes.plot([r["share"] * 100 for r in ours], [r["kl_mean"] for r in ours], "o-", label="TierKV")
    for name, r in zip(("none", "fast", "balanced", "quality"), ours, strict=True):
        place = (r["share"] * 100, r["kl_mean"])
        axes.annotate(name, place, (0, -14), textcoords="offset points", ha="center")
    others = {
        "CacheBlend 15 % (alone)": "s",
        "CacheBlend 15 % (served)": "D",
        "EPIC 16 (alone)": "^",
        "EPIC 32 (alone)": "v",
        "balanced, not corrected": "x",
    }
    for name, mark in others.items():
        axes.plot(rows[name]["share"] * 100, rows[name]["kl_mean"], mark, label=name)
    floor = rows["floor: same history, turned"]["kl_mean"]
    axes.axhline(floor, color="grey", linestyle=":", label="bfloat16 rounding alone")
    axes.set(
        xlabel="tokens recomputed, % of the documents'",
        ylabel="KL divergence from the full computation, nats",
        yscale="log",
    )
    axes.margins(0.1, 0.12)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--seed", type=int, default=11, help="of documents, donors and prompts")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="SVG of KL against recomputed share")
    parser.add_argument(
        "--mode", action="append", default=[], help="NAME=ANCHORS,EVERY,RATIO: one more"
    )
    args = parser.parse_args()
    lab = Lab(args.model or prepare_model(lambda text: print(text, file=sys.stderr)), args.dtype)
    rng = random.Random(args.seed)
    docs = documents(lab, args.documents, rng)
    modes = dict(MODES)
    for text in args.mode:
        name, _, rest = text.partition("=")
        count, every, share = rest.split(",")
        modes[name] = Mode(int(count), int(every), float(share))
    with torch.inference_mode():
        served = served_donors(lab, docs, rng)
        sink = [lab.tokenizer.bos_token_id or docs[0].tokens[0]]
        alone = [donor_behind(lab, sink, doc) for doc in docs]
        scores: dict[str, Score] = {}
        run = methods(lab, docs, served, alone, scores, modes)
        for number in range(args.prompts):
            run(make_case(lab, docs, rng))
            print(f"prompt {number + 1} of {args.prompts}", file=sys.stderr)
    baseline = scores["CacheBlend 15 % (alone)"]
    rows = {
        name: {
            "kl_mean": statistics.mean(s.kl),
            "kl_median": statistics.median(s.kl),
            "top1": statistics.mean(s.top1),
            "share": statistics.mean(s.share),
            "seconds_over_full": statistics.median(s.seconds),
            "kl_over_cacheblend": ratio(s, baseline),
        }
        for name, s in scores.items()
    }
    print(f"{'':34} {'share':>6} {'KL':>8} {'median':>8} {'top-1':>6} {'time':>5}  ÷ CacheBlend")
    for name, row in rows.items():
        r = row["kl_over_cacheblend"]
        print(
            f"{name:34} {row['share']:6.1%} {row['kl_mean']:8.5f} {row['kl_median']:8.5f}"
            f" {row['top1']:6.1%} {row['seconds_over_full']:5.2f}"
            f"  {r['value']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
        )
    if args.plot:
        plot(rows, args.plot)
    if args.json:
        ratios = {f"kl_{m}_over_cacheblend": rows[m]["kl_over_cacheblend"]["value"] for m in MODES}
        ratios |= {f"recomputed_share_{m}": rows[m]["share"] for m in MODES}
        args.json.write_text(json.dumps({"methods": rows, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
