# SPDX-License-Identifier: Apache-2.0
"""Configuration of the stats socket."""

from __future__ import annotations

from pydantic import Field

from tierkv.config.base import Model


class StatsConfig(Model):
    """The UNIX socket that `tierkv top`, `stat`, `why` and `pin` find by themselves."""

    socket: bool = Field(
        True,
        description="Let processes of the same user look into the engine through a UNIX socket of "
        "mode 0600",
    )
    control: bool = Field(
        False, description="Let them change something too: tierkv pin, tierkv purge"
    )
