# SPDX-License-Identifier: Apache-2.0
"""`tierkv purge`: forget stored KV by namespace, tenant or key; shows first what would go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.cli import columns, loading, output, progress, storage
from tierkv.errors import TierKVError

if TYPE_CHECKING:
    from tierkv.cli.storage import Places
    from tierkv.inventory import Inventory, NamespaceSummary, StoredChunk
    from tierkv.stats.client import Engine

EXAMPLE = """\
  tierkv purge --namespace 3f2a
  tierkv purge --tenant team-7 --yes
  tierkv purge --path /var/lib/tierkv --all --yes"""

JSON = {
    "done": "whether it was done; false if it was only shown, or is queued",
    "queued": "whether an idle engine does it before its next request",
    "targets": "list of `tier`, `namespace`, `model`, `whole_namespace`, `chunks`, `bytes`",
}

KEYS_AT_ONCE = 20_000
"""In one request to an engine, which takes 4 MiB."""


@dataclass(frozen=True, slots=True)
class _Target:
    """What goes from one namespace; `chunks` is None if all of it does."""

    inventory: Inventory
    summary: NamespaceSummary
    chunks: list[StoredChunk] | None

    @property
    def count(self) -> int:
        return self.summary.chunks if self.chunks is None else len(self.chunks)

    @property
    def nbytes(self) -> int:
        if self.chunks is None:
            return self.summary.allocated_bytes
        return sum(chunk.nbytes for chunk in self.chunks)


def purge(
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", metavar="NAMESPACE", help="All of it: its first digits, or its model."
        ),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant",
            metavar="SALT",
            help="What requests with this cache_salt stored; '' for requests without one.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="One chunk, and with it what follows it."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything in these places.")] = False,
    config: storage.ConfigOption = None,
    tier: storage.TierOption = None,
    path: storage.PathOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without it, only show.")] = False,
    as_json: loading.JsonOption = False,
) -> None:
    """Forget stored KV; show first what would go.

    Only --yes does it.

    In a directory at rest what goes is overwritten, or its files are removed. If an engine uses the
    directory it is asked to forget, in DRAM and all its tiers; it needs `stats: {control: true}`,
    and does not overwrite. On Redis engines may go on, and keep what they hold in DRAM.

    A tenant's chunks are found from the beginnings of its texts. Not among them is what the tenant
    computed with a LoRA adapter, and text whose beginning was evicted: only --namespace takes that.
    """
    if sum(each is not None for each in (namespace, tenant, key)) + everything == 0:
        raise typer.BadParameter("say what: --namespace, --tenant, --key or --all")
    if key is not None and (tenant is not None or everything):
        raise typer.BadParameter("--key goes with --namespace alone")
    if everything and (namespace is not None or tenant is not None):
        raise typer.BadParameter("--all goes with no other choice")
    with storage.places(config, tier, path) as found:
        targets = list(_targets(found, namespace, tenant, key))
        if namespace is not None and not targets and not found.failed:
            raise storage.no_namespace(namespace)
        targets = [each for each in targets if each.count or each.chunks is None]
        queued = False
        if yes:
            with progress.bar("purging", len(targets)) as tell:
                later = [_remove(each, tell) for each in targets]
            queued = any(later)
        _show(targets, yes, queued, as_json)
        found.finish()


def _targets(
    found: Places, namespace: str | None, tenant: str | None, key: str | None
) -> Iterator[_Target]:
    from tierkv.chains import below, tenant_root

    if key is not None:
        hits = [
            (inventory, summary, chunk)
            for inventory, summary, chunk in storage.find_chunks(found, key)
            if storage.matching([summary], namespace)
        ]
        if len({chunk.key for _, _, chunk in hits}) > 1:
            raise typer.BadParameter(f"{len(hits)} keys begin with {key}; give more digits")
        for inventory, summary, chunk in hits:
            following = [one for _, one in below(chunk.key, inventory.chunks(summary.name))]
            yield _Target(inventory, summary, [chunk, *following])
        return
    for inventory in found.inventories:
        for summary in storage.matching(storage.namespaces(inventory), namespace):
            if tenant is None:
                yield _Target(inventory, summary, None)
            elif not summary.problem:
                root = tenant_root(summary.digest, tenant, found.secret)
                mine = [one for _, one in below(root, inventory.chunks(summary.name))]
                yield _Target(inventory, summary, mine)


def _remove(target: _Target, tell: Callable[[int], None]) -> bool:
    """Forget; true if the engine that has the directory will do it later.

    Raises:
        TierKVError: an engine has the directory and does not forget this.
    """
    inventory, summary = target.inventory, target.summary
    tell(1)
    if inventory.holder is None:
        inventory.remove(summary.name, target.chunks)
        return False
    from tierkv.stats.client import engines

    found = engines()
    try:
        for engine in found:
            if engine.info["pid"] != inventory.holder:
                continue
            if engine.info.get("namespace") != summary.digest:
                raise TierKVError(
                    f"{inventory.tier}: {inventory.used_by} has the directory and serves another "
                    f"namespace than {summary.digest[:12]}; stop that engine first"
                )
            return _ask(engine, target)
    finally:
        for engine in found:
            engine.close()
    raise TierKVError(
        f"{inventory.tier}: {inventory.place} is in use by {inventory.used_by}, which cannot be "
        "asked; stop that engine first"
    )


def _ask(engine: Engine, target: _Target) -> bool:
    if target.chunks is None:
        return bool(engine.request("purge", all=True).get("queued"))
    keys = [chunk.key.hex() for chunk in target.chunks]
    answers = [
        engine.request("purge", keys=keys[start : start + KEYS_AT_ONCE])
        for start in range(0, len(keys), KEYS_AT_ONCE)
    ]
    return any(answer.get("queued") for answer in answers)


def _show(targets: list[_Target], yes: bool, queued: bool, as_json: bool) -> None:
    if as_json:
        output.result_json(
            {
                "done": yes and not queued,
                "queued": queued,
                "targets": [
                    {
                        "tier": each.summary.tier,
                        "namespace": each.summary.digest,
                        "model": each.summary.model or None,
                        "whole_namespace": each.chunks is None,
                        "chunks": each.count,
                        "bytes": each.nbytes,
                    }
                    for each in targets
                ],
            }
        )
        return
    if not targets:
        output.result("nothing stored matches")
        return
    rows = [
        (
            each.summary.tier,
            each.summary.digest[:12],
            each.summary.model or columns.NOTHING,
            "all" if each.chunks is None else "some",
            f"{each.count:,}",
            columns.size(each.nbytes),
        )
        for each in targets
    ]
    head = ("tier", "namespace", "model", "what", ">chunks", ">size")
    for line in columns.table(head, rows):
        output.result(line)
    if queued:
        output.result(
            "queued: the engine is idle and does it before its next request; send one to have it "
            "done now"
        )
        return
    if yes:
        output.result("purged")
        return
    holders = {each.inventory.tier: each.inventory.used_by for each in targets}
    for tier, holder in holders.items():
        if holder:
            output.message(f"{tier}: in use by {holder}, which --yes asks to forget it")
    output.message("nothing was changed; --yes purges this")
