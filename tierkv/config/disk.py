# SPDX-License-Identifier: Apache-2.0
"""Configuration of the disk tier: one directory, one engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tierkv.config.base import (
    AbsolutePath,
    BoundedTierConfig,
    Count,
    LowerTierConfig,
    TierName,
)
from tierkv.config.units import Size


class DiskConfig(LowerTierConfig, BoundedTierConfig):
    """A directory on a local file system, best on NVMe; survives restarts."""

    type: Literal["disk"] = Field("disk", description="What kind of tier this is")
    name: TierName = Field("disk", description="Names the tier in metrics and variables")
    path: AbsolutePath = Field(
        examples=["/var/lib/tierkv"],
        description="Directory of the tier; made with mode 0700 if it is missing. One engine each",
    )
    capacity: Size = Field(
        gt=0, examples=["1TiB"], description="Most bytes on disk, all models together"
    )
    min_free: Size = Field(
        1 << 30, ge=0, description="Free space of the file system that the tier leaves to others"
    )
    codec: Literal["raw", "lz4"] = Field(
        "raw", description="How chunks are packed: as they are (raw) or compressed (lz4)"
    )
    recover: Literal["none", "quiet", "strict"] = Field(
        "quiet",
        description="What is done at start with chunks of an earlier run: forget them (none), keep "
        "what is intact (quiet), or refuse to start if anything is damaged (strict)",
    )
    direct_io: Literal["auto", "never"] = Field(
        "auto", description="O_DIRECT where the file system takes it (auto), or never"
    )
    io_threads: Count = Field(8, ge=1, le=256, description="Reads and writes in flight at once")

    @property
    def reads_at_once(self) -> int:
        return self.io_threads
