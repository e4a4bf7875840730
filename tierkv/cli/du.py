# SPDX-License-Identifier: Apache-2.0
"""`tierkv du`: where the bytes are, and how much room is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.cli import columns, loading, output, storage

if TYPE_CHECKING:
    from tierkv.inventory import Inventory, NamespaceSummary

JSON = {
    "tiers": "list of `tier`, `place`, `in_use_by` (null: nobody seen), `allocated_bytes`, "
    "`chunk_bytes`, `chunks`, `capacity_bytes` and `free_bytes` (null: not known), and "
    "`namespaces` as of `ls`",
}

EXAMPLE = """\
  tierkv du
  tierkv du --path /var/lib/tierkv --json"""


def du(
    config: storage.ConfigOption = None,
    tier: storage.TierOption = None,
    path: storage.PathOption = None,
    as_json: loading.JsonOption = False,
) -> None:
    """Show how many bytes each tier and model takes.

    "allocated" is what the disk or the server has given, "in chunks" what of it is KV that can be
    loaded; the rest is free slots, kept for the next chunks, and what older versions left.
    """
    with storage.places(config, tier, path) as found:
        listed = [(inventory, storage.namespaces(inventory)) for inventory in found.inventories]
        if as_json:
            output.result_json({"tiers": [_json(*pair) for pair in listed]})
        else:
            rows = [row for _, summaries in listed for row in _rows(summaries)]
            if rows:
                head = ("tier", "namespace", "model", ">allocated", ">in chunks", ">chunks")
                for line in columns.table(head, rows):
                    output.result(line)
            for pair in listed:
                output.result(_total(*pair))
        found.finish()


def _json(inventory: Inventory, summaries: list[NamespaceSummary]) -> dict[str, object]:
    return {
        **storage.place_json(inventory),
        "allocated_bytes": sum(each.allocated_bytes for each in summaries),
        "chunk_bytes": sum(each.chunk_bytes for each in summaries),
        "chunks": sum(each.chunks for each in summaries),
        "capacity_bytes": inventory.capacity_bytes,
        "free_bytes": inventory.free_bytes,
        "namespaces": [storage.summary_json(summary) for summary in summaries],
    }


def _rows(summaries: list[NamespaceSummary]) -> list[tuple[str, ...]]:
    return [
        (
            each.tier,
            each.digest[:12],
            each.model or columns.NOTHING,
            columns.size(each.allocated_bytes),
            columns.size(each.chunk_bytes),
            f"{each.chunks:,}",
        )
        for each in sorted(summaries, key=lambda each: each.allocated_bytes, reverse=True)
    ]


def _total(inventory: Inventory, summaries: list[NamespaceSummary]) -> str:
    allocated = sum(each.allocated_bytes for each in summaries)
    line = f"{inventory.tier}: {columns.size(allocated)}"
    if inventory.capacity_bytes:
        share = allocated / inventory.capacity_bytes
        line += f" of {columns.size(inventory.capacity_bytes)} ({share:.0%})"
    line += f" in {inventory.place}"
    if inventory.free_bytes is not None:
        line += f"; its file system has {columns.size(inventory.free_bytes)} free"
    return line
