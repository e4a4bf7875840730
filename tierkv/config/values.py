# SPDX-License-Identifier: Apache-2.0
"""A configuration as a flat list of values, for those who print it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tierkv.config.base import Model, SecretRef
from tierkv.config.models import TierKVConfig


@dataclass(frozen=True, slots=True)
class EffectiveValue:
    """One value in effect.

    Attributes:
        path: dotted path, tiers by name: `tiers.disk.capacity`.
        value: as code sees it: bytes, seconds, text, None.
        text: as a file would have it: `1TiB`, `2s`.
        keys: the way to it in a configuration tree, tiers by index.
    """

    path: str
    value: str | int | float | None
    text: str
    keys: tuple[str | int, ...]


def effective_values(config: TierKVConfig) -> Iterator[EffectiveValue]:
    """Every value of `config`, in the order of the models; secrets as references only."""
    written = config.model_dump(mode="json")
    tiers = written.pop("tiers")
    yield from _values(config, written, "", ())
    for index, tier in enumerate(config.tiers):
        yield from _values(tier, tiers[index], f"tiers.{tier.name}.", ("tiers", index))


def _values(
    model: Model, written: dict[str, Any], prefix: str, keys: tuple[str | int, ...]
) -> Iterator[EffectiveValue]:
    for name, text in written.items():
        value = getattr(model, name)
        if isinstance(value, Model):
            if isinstance(value, SecretRef):  # has one of two
                text = {key: item for key, item in text.items() if item is not None}
            yield from _values(value, text, f"{prefix}{name}.", (*keys, name))
        else:
            plain = value if isinstance(value, int | float | None) else str(value)
            as_yaml = str(text).lower() if isinstance(text, bool) else str(text)
            shown = "(not set)" if value is None else as_yaml
            yield EffectiveValue(f"{prefix}{name}", plain, shown, (*keys, name))
