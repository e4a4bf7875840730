# SPDX-License-Identifier: Apache-2.0
"""What `ls`, `du`, `inspect`, `verify` and `purge` share: which places they look at, and for what.

Places are the tiers below DRAM of the configuration in effect, or one directory (`--path`). One
that cannot be read does not keep the others from being shown; the exit code is 1 then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli import loading, output, progress
from tierkv.errors import ConfigError, TierKVError

if TYPE_CHECKING:
    from tierkv.config.base import LowerTierConfig
    from tierkv.inventory import Inventory, NamespaceSummary, StoredChunk

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        readable=False,
        help="Configuration file. [default: $TIERKV_CONFIG, else tierkv.yaml]",
        show_default=False,
    ),
]
TierOption = Annotated[
    str | None,
    typer.Option("--tier", metavar="NAME", help="Only this tier of the configuration."),
]
PathOption = Annotated[
    Path | None,
    typer.Option("--path", metavar="DIR", help="A disk tier's directory; no configuration needed."),
]


class Places:
    """The places that could be opened."""

    def __init__(self) -> None:
        self.inventories: list[Inventory] = []
        self.failed: list[str] = []
        self.secret = b""
        """Of the configuration's key_secret."""

    def finish(self) -> None:
        """End with 1 if something could not be looked at."""
        if self.failed:
            raise typer.Exit(1)


@contextmanager
def places(config: Path | None, tier: str | None, path: Path | None) -> Iterator[Places]:
    """Open what the options name. Those that cannot be opened are told on stderr, and counted."""
    found = Places()
    try:
        for each in _chosen(found, config, tier, path):
            try:
                inventory = _open(each)
            except (TierKVError, ModuleNotFoundError) as error:
                found.failed.append(_one_line(error))
                output.message(f"tierkv: {found.failed[-1]}")
            else:
                if inventory is not None:
                    found.inventories.append(inventory)
        yield found
    finally:
        for inventory in found.inventories:
            inventory.close()


def _open(each: Path | LowerTierConfig) -> Inventory | None:
    from tierkv.inventory import open_inventory

    if isinstance(each, Path):
        from tierkv.inventory.disk import DiskInventory

        return DiskInventory(each.absolute())
    return open_inventory(each)


def _one_line(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        if (error.name or "").partition(".")[0] not in ("redis", "hiredis"):
            raise error
        return f"a Redis tier needs {error.name}; run: pip install 'tierkv[redis]'"
    return str(error)


def _chosen(
    found: Places, config: Path | None, tier: str | None, path: Path | None
) -> Sequence[Path | LowerTierConfig]:
    if path is not None:
        if tier is not None:
            raise typer.BadParameter("give --tier or --path, not both")
        if config is None:
            return [path]
    loaded = loading.load(None, config, check_machine=False, json_list=None)
    if loaded.config.key_secret is not None:
        from tierkv.config import resolve_secret

        found.secret = resolve_secret(loaded.config.key_secret)
    if path is not None:
        return [path]
    lower = loaded.config.lower
    chosen = [each for each in lower if tier in (None, each.name)]
    if not chosen:
        where = loaded.file or "the default configuration"
        names = ", ".join(each.name for each in lower)
        reason = (
            f"no tier is named {tier!r}; those below DRAM: {names}"
            if names
            else "no tier below DRAM, so nothing is stored outside of running engines; "
            "give --config FILE or --path DIR"
        )
        raise ConfigError(f"{where}: {reason}")
    return chosen


# -- what is meant -----------------------------------------------------------------------------


def namespaces(inventory: Inventory) -> list[NamespaceSummary]:
    """What a place holds; says that it is being looked at, since a server may have many keys."""
    with progress.spinner("looking at") as tell:
        tell(f"{inventory.tier} in {inventory.place}")
        return inventory.namespaces()


def matching(summaries: Sequence[NamespaceSummary], wanted: str | None) -> list[NamespaceSummary]:
    """The namespaces whose digest begins with, or whose model is, `wanted`; None: all."""
    if wanted is None:
        return list(summaries)
    lower = wanted.lower()
    return [
        each
        for each in summaries
        if (re.fullmatch("[0-9a-f]{4,32}", lower) and each.digest.startswith(lower))
        or (each.model and each.model == wanted)
    ]


def no_namespace(wanted: str) -> ConfigError:
    """The end of a command that was asked for a namespace that is nowhere."""
    return ConfigError(
        f"no namespace is {wanted!r}: give the first 4 or more digits of its digest, or its "
        "model's name, as 'tierkv ls' shows them"
    )


def find_chunks(found: Places, key: str) -> list[tuple[Inventory, NamespaceSummary, StoredChunk]]:
    """Every stored chunk whose key begins with `key`, in all places.

    Raises:
        ConfigError: that is no key.
    """
    if not re.fullmatch("[0-9a-f]{4,32}", key.lower()):
        raise ConfigError(
            f"{key!r} is no key: give 4 to 32 hexadecimal digits, as 'tierkv ls NAMESPACE' shows "
            "them"
        )
    hits = []
    for inventory in found.inventories:
        for summary in namespaces(inventory):
            if summary.problem:
                continue
            hits += [
                (inventory, summary, chunk)
                for chunk in inventory.chunks(summary.name)
                if chunk.key.hex().startswith(key.lower())
            ]
    return hits


# -- for programs ------------------------------------------------------------------------------


def place_json(inventory: Inventory) -> dict[str, Any]:
    """A place, without what is in it."""
    return {
        "tier": inventory.tier,
        "place": inventory.place,
        "in_use_by": inventory.used_by or None,
    }


def summary_json(summary: NamespaceSummary) -> dict[str, Any]:
    """A namespace."""
    return {
        "tier": summary.tier,
        "namespace": summary.digest,
        "model": summary.model or None,
        "about": dict(summary.about),
        "chunks": summary.chunks,
        "tokens": summary.tokens,
        "chunk_bytes": summary.chunk_bytes,
        "allocated_bytes": summary.allocated_bytes,
        "oldest_ns": summary.oldest_ns,
        "newest_ns": summary.newest_ns,
        "used_ns": summary.used_ns,
        "problem": summary.problem or None,
    }


def chunk_json(chunk: StoredChunk) -> dict[str, Any]:
    """A chunk as it is listed."""
    return {
        "key": chunk.key.hex(),
        "parent": chunk.parent.hex(),
        "tokens": chunk.tokens,
        "bytes": chunk.nbytes,
        "created_ns": chunk.created_ns,
        "used_ns": chunk.used_ns,
    }
