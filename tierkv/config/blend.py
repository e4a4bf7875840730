# SPDX-License-Identifier: Apache-2.0
"""Settings of the reuse of any text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tierkv.config.base import Count, Model
from tierkv.config.units import Duration, Size


def _off(value: Any) -> Any:
    # YAML reads the word off as a truth value.
    return "off" if value is False else value


class BlendConfig(Model):
    """Reuse of text that was cached in another place: approximate, and so off by default."""

    mode: Annotated[
        Literal["off", "on_request", "fast", "balanced", "quality"], BeforeValidator(_off)
    ] = Field(
        "off",
        description="off: only prefixes are reused, exactly. fast, balanced, quality: text is "
        "reused anywhere in a prompt, and the few tokens of it that matter are recomputed. "
        "on_request: for requests that ask for one of these. See "
        "docs/explanation/any-text-reuse.md",
    )
    anchor_tokens: Count | None = Field(
        None,
        ge=0,
        le=1024,
        examples=[16],
        description="Tokens recomputed at the beginning of each piece of reused text. Without it "
        "the mode's",
    )
    sample_every: Count | None = Field(
        None,
        ge=0,
        le=1024,
        examples=[32],
        description="Behind those, one of so many tokens is recomputed, and what they have in "
        "common by way of drift is added to the tokens between them. 0: none. Without it the "
        "mode's",
    )
    recompute_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        examples=[0.1],
        description="Share of the reused tokens recomputed besides: those that the end of the "
        "prompt attends to most. With more than 0 also the passages that it points to. Without it "
        "the mode's",
    )
    min_tokens: Count = Field(
        256, ge=1, le=1 << 20, description="Least tokens to reuse; below, the prompt is computed"
    )
    exact_after: Count = Field(
        2,
        ge=0,
        le=1 << 20,
        description="A prompt that was served blended so often is computed in full the next time "
        "and stored exactly. 0: never",
    )
    max_blend_tokens_per_step: Count = Field(
        2048,
        ge=1,
        le=1 << 20,
        description="Tokens recomputed between two steps of the engine, so that other requests do "
        "not wait long",
    )
    max_prompt_bytes: Size = Field(
        4 << 30,
        description="Most memory on the engine's device for the KV of prompts while they are "
        "blended; those that find no room wait, a longer prompt is computed",
    )
    max_donors: Count = Field(
        1_000_000,
        ge=1,
        le=1 << 26,
        description="Chunks that are remembered as donors; each takes about 1 KiB of memory and 4 "
        "bytes a token",
    )
    recall_deadline: Duration = Field(
        3.0,
        ge=0,
        description="Time spent at start on reading the text of chunks that are on disk, the last "
        "used first, so that they are reused anywhere at once. 0: none",
    )
    shadow: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of blended requests that are also computed in full when the engine is "
        "idle, to measure what is lost",
    )
