# SPDX-License-Identifier: Apache-2.0
"""Which tiers a configuration may name. A new tier: one file with its model, one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias, Union

from pydantic import Field

from tierkv.config.base import TierConfig
from tierkv.config.disk import DiskConfig
from tierkv.config.dram import DramConfig
from tierkv.config.redis import RedisConfig

TIER_MODELS: dict[str, type[TierConfig]] = {
    "dram": DramConfig,
    "disk": DiskConfig,
    "redis": RedisConfig,
}

if TYPE_CHECKING:
    AnyTier: TypeAlias = TierConfig
else:
    AnyTier = Annotated[Union[tuple(TIER_MODELS.values())], Field(discriminator="type")]  # noqa: UP007
