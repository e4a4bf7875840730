# SPDX-License-Identifier: Apache-2.0
"""The configuration as the rest of TierKV sees it: validated, complete, immutable.

Sizes are ints of bytes and durations floats of seconds. Built from a file by
`tierkv.config.load_config`, or straight from Python (`DramConfig(capacity=1 << 30)`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tierkv.config.base import Count, LowerTierConfig, Model, SecretRef, TierConfig
from tierkv.config.blend import BlendConfig
from tierkv.config.disk import DiskConfig
from tierkv.config.dram import DramConfig
from tierkv.config.registry import AnyTier
from tierkv.config.stats import StatsConfig

__all__ = [
    "BlendConfig",
    "DiskConfig",
    "DramConfig",
    "LowerTierConfig",
    "SecretRef",
    "StatsConfig",
    "TierConfig",
    "TierKVConfig",
]


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A tier that cannot stand where it does.

    Attributes:
        index: its place in the list; 0 also if the list is empty.
        field: the field to blame, "" for the tier as a whole.
        reason: why, and what to do.
    """

    index: int
    field: str
    reason: str


def arrangement_problems(tiers: Sequence[tuple[str, str, str]]) -> list[Misplaced]:
    """What is wrong with a list of tiers taken together.

    Args:
        tiers: type, name and path ("" where there is none) of each, in order.
    """
    problems = []
    kinds = [kind for kind, _, _ in tiers]
    if "dram" not in kinds:
        problems.append(
            Misplaced(0, "", "the first tier must be dram; put {type: dram, capacity: 8GiB} first")
        )
    elif kinds[0] != "dram":
        index = kinds.index("dram")
        problems.append(Misplaced(index, "", "the dram tier must be first; move it to the top"))
    names: set[str] = set()
    paths: set[str] = set()
    drams = 0
    for index, (kind, name, path) in enumerate(tiers):
        drams += kind == "dram"
        if kind == "dram" and drams > 1:
            problems.append(
                Misplaced(index, "", "a second dram tier; keep one and add the capacities")
            )
        elif name in names:
            reason = f"a tier named {name!r} stands above; give this one another name"
            problems.append(Misplaced(index, "name", reason))
        names.add(name)
        if path and path in paths:
            reason = f"another tier uses {path!r}; give each tier a directory of its own"
            problems.append(Misplaced(index, "path", reason))
        paths.add(path)
    return problems


class TierKVConfig(Model):
    """Everything a user can set."""

    version: Literal[1] = Field(1, description="Version of this file format")
    key_secret: SecretRef | None = Field(
        None,
        examples=[{"file": "/run/secrets/tierkv-key"}],
        description="Secret that keys all digests, by reference: {file: PATH} or {env: NAME}. "
        "Without one, digests are plain hashes",
    )
    chunk_tokens: Count | None = Field(
        None,
        ge=1,
        le=65536,
        examples=[128],
        description="Tokens in a chunk, a multiple of the engine's block size. Without it 64, or "
        "one block where blocks are larger",
    )
    save: Literal["prompt", "all"] = Field(
        "all", description="What is saved: the KV of prompts, or of generated tokens too"
    )
    stats: StatsConfig = Field(
        StatsConfig.model_validate({}),
        description="The socket behind tierkv top, stat, why and pin",
    )
    blend: BlendConfig = Field(
        BlendConfig.model_validate({}),
        description="Reuse of text that was cached in another place of another prompt",
    )
    tiers: tuple[AnyTier, ...] = Field(
        description="Where KV is kept, fastest first; the first is dram",
        examples=[[{"type": "dram", "capacity": "8GiB"}]],
        json_schema_extra={"minItems": 1},
    )

    @field_validator("tiers")
    @classmethod
    def _well_arranged(cls, tiers: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
        found = arrangement_problems(
            [(tier.type, tier.name, str(getattr(tier, "path", ""))) for tier in tiers]
        )
        if found:
            raise PydanticCustomError(
                "tier_arrangement",
                "{reason}",
                {"reason": "; ".join(f"tier {p.index}: {p.reason}" for p in found)},
            )
        return tiers

    @model_validator(mode="after")
    def _shared_names_are_keyed(self) -> Self:
        shared = [tier.name for tier in self.tiers if tier.is_shared]
        if shared and self.key_secret is None:
            raise PydanticCustomError(
                "key_secret",
                "key_secret: missing; tier {name} is shared, and without a secret of its engines "
                "the names of chunks tell what text they hold; add key_secret: {braces}",
                {"name": shared[0], "braces": "{file: PATH}"},
            )
        return self

    @property
    def dram(self) -> DramConfig:
        """The first tier."""
        first = self.tiers[0]
        assert isinstance(first, DramConfig)  # arrangement_problems saw to it
        return first

    @property
    def lower(self) -> tuple[LowerTierConfig, ...]:
        """The tiers below DRAM, fastest first."""
        return tuple(tier for tier in self.tiers if isinstance(tier, LowerTierConfig))
