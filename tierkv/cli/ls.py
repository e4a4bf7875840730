# SPDX-License-Identifier: Apache-2.0
"""`tierkv ls`: what is cached below DRAM, by namespace and model, or chunk by chunk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli import columns, loading, output, storage

if TYPE_CHECKING:
    from tierkv.inventory import Inventory, NamespaceSummary, StoredChunk

JSON = {
    "places": "list of `tier`, `place` and `in_use_by` (null: nobody seen)",
    "namespaces": "list of `tier`, `namespace` (digest), `model` (null: not known), `about`, "
    "`chunks`, `tokens`, `chunk_bytes`, `allocated_bytes`, `oldest_ns`, `newest_ns`, `used_ns` "
    "(ns since 1970, null: not known) and `problem` (null: can be read)",
    "total, chunks": "instead of these, with NAMESPACE: how many chunks there are, and a list of "
    "`tier`, `namespace`, `key`, `parent`, `tokens`, `bytes`, `created_ns`, `used_ns`",
}

EXAMPLE = """\
  tierkv ls
  tierkv ls --path /var/lib/tierkv
  tierkv ls 3f2a --limit 10"""


def ls(
    namespace: Annotated[
        str | None,
        typer.Argument(
            metavar="NAMESPACE",
            help="List the chunks of this one: its first digits, or its model's name.",
            show_default=False,
        ),
    ] = None,
    config: storage.ConfigOption = None,
    tier: storage.TierOption = None,
    path: storage.PathOption = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="Most chunks listed, last used first.")
    ] = 50,
    as_json: loading.JsonOption = False,
) -> None:
    """Show what is cached on disk and in Redis.

    Works beside running engines and changes nothing. A namespace is KV of one model, one geometry
    and one vLLM version. Ages are since the last use, where the tier knows it, and since the first
    and the last chunk were written.
    """
    with storage.places(config, tier, path) as found:
        listed = [
            (inventory, storage.matching(storage.namespaces(inventory), namespace))
            for inventory in found.inventories
        ]
        if namespace is None:
            _namespaces(listed, as_json)
        else:
            chosen = [(place, summary) for place, summaries in listed for summary in summaries]
            if not chosen and not found.failed:
                raise storage.no_namespace(namespace)
            _chunks(chosen, limit, as_json)
        found.finish()


def _namespaces(listed: list[tuple[Inventory, list[NamespaceSummary]]], as_json: bool) -> None:
    if as_json:
        output.result_json(
            {
                "places": [storage.place_json(inventory) for inventory, _ in listed],
                "namespaces": [
                    storage.summary_json(summary) for _, each in listed for summary in each
                ],
            }
        )
        return
    now = time.time_ns()
    rows = []
    for inventory, summaries in listed:
        if inventory.used_by:
            output.message(f"{inventory.tier}: in use by {inventory.used_by}: a moment's picture")
        if not summaries:
            output.message(f"{inventory.tier}: nothing is cached in {inventory.place}")
        for summary in summaries:
            if summary.problem:
                output.message(
                    f"{summary.tier}: {summary.digest[:12]} cannot be read: {summary.problem}"
                )
            rows.append(
                (
                    summary.tier,
                    summary.digest[:12],
                    summary.model or columns.NOTHING,
                    f"{summary.chunks:,}",
                    f"{summary.tokens:,}",
                    columns.size(summary.chunk_bytes),
                    columns.age(summary.used_ns, now),
                    columns.age(summary.oldest_ns, now),
                    columns.age(summary.newest_ns, now),
                )
            )
    head = ("tier", "namespace", "model", ">chunks", ">tokens", ">size", ">used", ">oldest")
    if rows:
        for line in columns.table((*head, ">newest"), rows):
            output.result(line)


def _chunks(chosen: list[tuple[Inventory, NamespaceSummary]], limit: int, as_json: bool) -> None:
    listed: list[tuple[NamespaceSummary, StoredChunk]] = [
        (summary, chunk)
        for inventory, summary in chosen
        if not summary.problem
        for chunk in inventory.chunks(summary.name)
    ]
    listed.sort(key=lambda pair: pair[1].used_ns or pair[1].created_ns or 0, reverse=True)
    shown = listed[:limit]
    if as_json:
        chunks: list[dict[str, Any]] = [
            {"tier": summary.tier, "namespace": summary.digest, **storage.chunk_json(chunk)}
            for summary, chunk in shown
        ]
        output.result_json({"total": len(listed), "chunks": chunks})
        return
    now = time.time_ns()
    for summary in (summary for _, summary in chosen if summary.problem):
        output.message(f"{summary.tier}: {summary.digest[:12]} cannot be read: {summary.problem}")
    rows = [
        (
            summary.tier,
            chunk.key.hex(),
            f"{chunk.tokens:,}",
            columns.size(chunk.nbytes),
            columns.age(chunk.used_ns, now),
            columns.age(chunk.created_ns, now),
        )
        for summary, chunk in shown
    ]
    if rows:
        for line in columns.table(("tier", "key", ">tokens", ">size", ">used", ">written"), rows):
            output.result(line)
    if len(listed) > len(shown):
        output.message(f"{len(listed) - len(shown):,} more; --limit shows them")
