# SPDX-License-Identifier: Apache-2.0
"""Configuration of the DRAM tier: the pool that workers copy into and out of."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tierkv.config.base import BoundedTierConfig, TierName
from tierkv.config.units import Size


class DramConfig(BoundedTierConfig):
    """Main memory, the first tier; every configuration has exactly one."""

    type: Literal["dram"] = Field("dram", description="What kind of tier this is")
    name: TierName = Field("dram", description="Names the tier in metrics and variables")
    capacity: Size = Field(
        gt=0,
        examples=["32GiB"],
        description="Memory for chunks, taken at start; per engine, for all its workers",
    )
