# SPDX-License-Identifier: Apache-2.0
"""Which slots of a tier are given up first: the contract, and a registry that imports on demand."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from tierkv.errors import ConfigError
from tierkv.policies.base import EvictionPolicy

__all__ = ["KNOWN_POLICIES", "EvictionPolicy", "make_policy"]

KNOWN_POLICIES: dict[str, str] = {
    "lru": "tierkv.policies.lru:LRU",
    "s3fifo": "tierkv.policies.s3fifo:S3FIFO",
}
"""Name in the configuration to `module:Class`; others: the entry points `tierkv.policies`."""


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """An empty policy over the slots 0 … capacity-1.

    Raises:
        ConfigError: no such policy; the message lists the known ones.
    """
    target = KNOWN_POLICIES.get(name)
    if target is None:
        found = {point.name: point.value for point in entry_points(group="tierkv.policies")}
        target = found.get(name)
        if target is None:
            known = ", ".join(sorted({*KNOWN_POLICIES, *found}))
            raise ConfigError(f"policy: unknown eviction policy {name!r}; choose one of {known}")
    module, _, attribute = target.partition(":")
    policy = getattr(import_module(module), attribute)(capacity)
    assert isinstance(policy, EvictionPolicy), f"{target} is no EvictionPolicy"
    return policy
