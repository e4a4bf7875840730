# SPDX-License-Identifier: Apache-2.0
"""What of a prompt is taken from donors, what is computed anew for certain, and how much by choice.

Computed anew, in every mode: what no donor has; the first tokens of each run, which were computed
as part of another text and took the part of its beginning (anchors); tokens in even distances
behind them (samples), which tell how far the rest of the run has drifted from what it was in its
old context; and the end of the prompt, which is what asks. Beyond those, the modes but `fast`
recompute a few passages that the end of the prompt points to, and of all reused tokens those that
it attends to most: which they are is known only when it has been run (see
`docs/explanation/any-text-reuse.md` for what each of these is worth, measured).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.blend.match import Run
from tierkv.config.blend import BlendConfig
from tierkv.keys import Chunk

QUERY_TOKENS = 32
"""Tokens at the end whose attention chooses what else is recomputed, at most."""
LEAST_QUERY = 8
"""Fewer tokens than this behind the last run, a template's closing words say, ask nothing: the end
of the run is looked at too."""
PASSAGES, PASSAGE_TOKENS = 4, 16
"""Places that the question points to, and how much around each is recomputed."""
PASSAGES_SHARE = 16
"""All passages together are one in so many of the reused tokens at most."""
TAIL_TOKENS = 256
"""Tokens behind the last run that are computed here; the engine computes what is behind them."""

SEGMENT_TOKENS = 512
"""Reused tokens that are taken to have drifted alike; longer runs are cut into equal parts."""
MIN_SAMPLES = 2
"""Of a segment: one alone does not tell how far it can be trusted."""

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mode:
    """How much is recomputed.

    Attributes:
        anchor_tokens: at the beginning of each run.
        sample_every: behind them one of so many, where that makes two at least; 0 for none.
        ratio: of all reused tokens, by choice. With more than 0 also the passages.
    """

    anchor_tokens: int
    sample_every: int
    ratio: float


MODES = {
    "fast": Mode(4, 32, 0.0),
    "balanced": Mode(4, 32, 0.03),
    "quality": Mode(8, 24, 0.09),
}


def mode_of(config: BlendConfig, name: str | None = None) -> Mode:
    """The mode in effect.

    Args:
        config: its own values go before the mode's.
        name: a request's own choice, if it made one.
    """
    mode = MODES[name or config.mode]
    if name is not None and name != config.mode:
        return mode
    anchors, every, ratio = config.anchor_tokens, config.sample_every, config.recompute_ratio
    return Mode(
        mode.anchor_tokens if anchors is None else anchors,
        mode.sample_every if every is None else every,
        mode.ratio if ratio is None else ratio,
    )


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """A prompt's tokens [exact, end), by where they come from.

    Attributes:
        exact: leading tokens whose KV is exact.
        end: behind the last token that is blended or computed here.
        runs: what donors cover.
        fixed: int64, ascending: positions that are recomputed in any case.
        samples: of these the ones that tell the drift of their segment.
        segments: int64 [n, 2], ascending: [begin, end) of the parts of the runs, behind their
            anchors, that drift alike.
        query: of these the ones whose attention chooses; none where nothing is chosen.
        extra: reused tokens that are recomputed by choice.
    """

    exact: int
    end: int
    runs: tuple[Run, ...]
    fixed: Positions
    samples: Positions
    segments: Positions
    query: Positions
    extra: int

    @property
    def first_approximate(self) -> int:
        """Where exactness ends: whatever is behind it is approximate, computed or not."""
        return self.runs[0].begin

    @property
    def reused(self) -> int:
        """Tokens that are taken from donors and not computed."""
        return self.end - self.exact - len(self.fixed) - self.extra

    @property
    def last_is_computed(self) -> bool:
        """Whether the last token is one of those that are recomputed in any case."""
        return len(self.fixed) > 0 and int(self.fixed[-1]) == self.end - 1

    @property
    def recomputed(self) -> int:
        return len(self.fixed) + self.extra

    def chunks(self) -> Iterator[Chunk]:
        """Of all donors, run by run; a donor of two runs comes twice."""
        return (donor.chunk for run in self.runs for donor in run.donors)


def make_plan(exact: int, tokens: int, runs: Sequence[Run], mode: Mode) -> BlendPlan:
    """Plan a prompt.

    Args:
        exact: leading tokens whose KV is exact.
        tokens: of the prompt.
        runs: at least one, as `find_runs` gives them.
        mode: how much to recompute.
    """
    end = min(tokens, runs[-1].end + TAIL_TOKENS)
    fixed = np.ones(end, dtype=bool)
    fixed[:exact] = False
    segments = []
    for run in runs:
        fixed[run.begin + mode.anchor_tokens : run.end] = False
        segments += _segments(run.begin + mode.anchor_tokens, run.end)
    samples = [place for part in segments for place in _samples(*part, mode.sample_every)]
    fixed[samples] = True
    # Where the engine goes on, the question lies ahead: what follows the runs stands for it.
    query_end = end if end == tokens else min(end, runs[-1].end + QUERY_TOKENS)
    covered = sum(len(run) for run in runs)
    wanted = round(mode.ratio * covered)
    if wanted:
        wanted += min(PASSAGES * PASSAGE_TOKENS, covered // PASSAGES_SHARE)
    asks = query_end - runs[-1].end
    asks = min(asks, QUERY_TOKENS) if asks >= LEAST_QUERY else QUERY_TOKENS
    query = np.arange(max(exact, query_end - asks) if wanted else query_end, query_end)
    fixed[query] = True
    free = end - exact - int(fixed.sum())
    return BlendPlan(
        exact=exact,
        end=end,
        runs=tuple(runs),
        fixed=np.flatnonzero(fixed),
        samples=np.array(samples, dtype=np.int64),
        segments=np.array(segments, dtype=np.int64).reshape(-1, 2),
        query=query,
        extra=min(free, wanted),
    )


def _segments(begin: int, end: int) -> list[tuple[int, int]]:
    """Equal parts of about `SEGMENT_TOKENS`."""
    if begin >= end:
        return []
    parts = max(1, round((end - begin) / SEGMENT_TOKENS))
    cuts = [begin + (end - begin) * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(cuts))


def _samples(begin: int, end: int, every: int) -> list[int]:
    """Places in the middle of about `every` tokens each."""
    count = round((end - begin) / every) if every else 0
    if count < MIN_SAMPLES:
        return []
    return [begin + (2 * i + 1) * (end - begin) // (2 * count) for i in range(count)]
