# SPDX-License-Identifier: Apache-2.0
"""`tierkv verify`: read everything that is stored, compare the checksums, drop what is damaged."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.cli import columns, loading, output, progress, rates, storage

if TYPE_CHECKING:
    from tierkv.inventory import Inventory, NamespaceSummary, Problem

EXAMPLE = """\
  tierkv verify
  tierkv verify --path /var/lib/tierkv --rate 1GiB/s
  tierkv verify --repair"""

JSON = {
    "ok": "whether nothing is damaged",
    "repaired": "whether what is damaged was dropped",
    "chunks, bytes, seconds": "what was read, and how long it took",
    "problems": "list of `tier`, `namespace`, `what` (a key, or a part of a file), `reason`",
}

DAMAGED = 3


def verify(
    config: storage.ConfigOption = None,
    tier: storage.TierOption = None,
    path: storage.PathOption = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", metavar="NAMESPACE", help="Only this one, or this model."),
    ] = None,
    rate: Annotated[
        str, typer.Option("--rate", help="Most bytes read a second; none for no limit.")
    ] = "200MiB/s",
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop what is damaged; needs a directory at rest.")
    ] = False,
    as_json: loading.JsonOption = False,
) -> None:
    """Read all stored chunks and compare their checksums.

    Works beside running engines, and leaves them most of the disk (--rate). Nothing that is found
    here was ever served: every load makes the same checks. Exit code 3 if something is damaged,
    repaired or not.
    """
    limit = rates.parse_rate(rate)
    with storage.places(config, tier, path) as found:
        started, reports = time.monotonic(), []
        for inventory in found.inventories:
            chosen = storage.matching(storage.namespaces(inventory), namespace)
            reports += [(inventory, each, *_scrub(inventory, each, limit)) for each in chosen]
        if namespace is not None and not reports and not found.failed:
            raise storage.no_namespace(namespace)
        problems = [(inventory, problem) for inventory, *_, bad in reports for problem in bad]
        if repair:
            for inventory in found.inventories:
                mine = [problem for place, problem in problems if place is inventory]
                if mine:
                    inventory.drop(mine)
        chunks = sum(count for _, _, count, _, _ in reports)
        nbytes = sum(size for _, _, _, size, _ in reports)
        seconds = time.monotonic() - started
        if as_json:
            output.result_json(
                {
                    "ok": not problems,
                    "repaired": repair,
                    "chunks": chunks,
                    "bytes": nbytes,
                    "seconds": round(seconds, 3),
                    "problems": [
                        {
                            "tier": inventory.tier,
                            "namespace": problem.namespace.partition("-v")[0],
                            "what": problem.what,
                            "reason": problem.reason,
                        }
                        for inventory, problem in problems
                    ],
                }
            )
        else:
            for inventory, problem in problems:
                where = f"{inventory.tier}/{problem.namespace[:12]}/{problem.what}"
                output.result(f"{output.styled(where, 'red')}: {problem.reason}")
            read = f"{columns.count(chunks, 'chunk')}, {columns.size(nbytes)} in {seconds:.1f} s"
            verdict = _verdict(len(problems), repair) if reports else "nothing to check"
            output.result(f"{read}: {verdict}")
        if problems:
            if not repair:
                output.message("tierkv: run 'tierkv verify --repair' to drop what is damaged")
            raise typer.Exit(DAMAGED)
        found.finish()


def _verdict(bad: int, repair: bool) -> str:
    if not bad:
        return "all intact"
    return f"{bad:,} damaged" + (", dropped" if repair else "")


def _scrub(
    inventory: Inventory, summary: NamespaceSummary, rate: float | None
) -> tuple[int, int, list[Problem]]:
    """Chunks and bytes read, and what is wrong."""
    from tierkv.inventory.scrub import Throttle, scrub

    chunks, nbytes, problems = 0, 0, []
    what = f"{summary.tier} {summary.model or summary.digest[:12]}"
    with progress.bar(what, summary.chunk_bytes, in_bytes=True) as done:
        for step in scrub(inventory, summary, Throttle(rate)):
            chunks += step.nbytes > 0
            nbytes += step.nbytes
            done(step.nbytes)
            if step.problem is not None:
                problems.append(step.problem)
    return chunks, nbytes, problems
