# SPDX-License-Identifier: Apache-2.0
"""From a tier's configuration to the tier, importing only what is configured."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points

from tierkv.config.models import LowerTierConfig
from tierkv.errors import ConfigError
from tierkv.tiers.base import Tier


@dataclass(frozen=True, slots=True)
class KnownTier:
    """Where a tier's class is, and what it needs.

    Attributes:
        target: `module:Class`; the class is called with the tier's configuration.
        install: command that brings what it imports; empty if nothing but TierKV is needed.
    """

    target: str
    install: str = ""


KNOWN_TIERS: dict[str, KnownTier] = {
    "disk": KnownTier("tierkv.tiers.disk.tier:DiskTier"),
    "redis": KnownTier("tierkv.tiers.redis.tier:RedisTier", "pip install 'tierkv[redis]'"),
}
"""By the configuration's `type`; others come from the entry points `tierkv.tiers`."""


def make_tier(config: LowerTierConfig) -> Tier:
    """The tier for this configuration, not opened yet.

    Raises:
        ConfigError: no such type, or a package it needs is missing; the message says what to do.
    """
    known = KNOWN_TIERS.get(config.type)
    if known is None:
        found = {point.name: point.value for point in entry_points(group="tierkv.tiers")}
        if config.type not in found:
            names = ", ".join(sorted({*KNOWN_TIERS, *found}))
            raise ConfigError(f"tiers: unknown tier type {config.type!r}; choose one of {names}")
        known = KnownTier(found[config.type])
    module, _, attribute = known.target.partition(":")
    try:
        tier = getattr(import_module(module), attribute)(config)
    except ImportError as error:
        remedy = known.install or f"install what provides {error.name}"
        raise ConfigError(
            f"tiers: the {config.type} tier needs {error.name}, which is not installed: {remedy}"
        ) from error
    assert isinstance(tier, Tier), f"{known.target} is no Tier"
    return tier
