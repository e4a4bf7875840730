# SPDX-License-Identifier: Apache-2.0
"""What `Store.open` found, for the start-up block and `tierkv doctor`. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.pages.layout import SlotLayout


@dataclass(frozen=True, slots=True)
class TierSummary:
    """One tier in use.

    Attributes:
        capacity_bytes: as the tier's medium counts them; 0 means unknown.
        capacity_chunks: chunks of this layout that fit; 0 means unknown.
        recovered_chunks: found from an earlier run.
        recovered_bytes: of those.
        seconds: that opening took.
        notes: things an operator should know, one sentence each.
    """

    capacity_bytes: int
    capacity_chunks: int
    recovered_chunks: int = 0
    recovered_bytes: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What is in use.

    Attributes:
        namespace: digest, hexadecimal.
        layout: sizes of a chunk.
        tiers: by name, DRAM first.
        disabled: name of a tier that is left out, to the reason and remedy.
    """

    namespace: str
    layout: SlotLayout
    tiers: dict[str, TierSummary]
    disabled: dict[str, str] = field(default_factory=dict)
