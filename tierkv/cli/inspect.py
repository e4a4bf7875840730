# SPDX-License-Identifier: Apache-2.0
"""`tierkv inspect`: one chunk's header, its place in the chain, and whether it is intact."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli import columns, loading, output, storage
from tierkv.errors import FormatError, TierKVError

if TYPE_CHECKING:
    from tierkv.cli.storage import Places
    from tierkv.inventory import Inventory, NamespaceSummary, StoredChunk
    from tierkv.record import RecordHeader

EXAMPLE = """\
  tierkv inspect 9c41d2
  tierkv inspect 9c41d2 --tokens --json"""

JSON = {
    "chunks": "list, one entry a tier that has it: `tier`, `place`, `namespace`, `model`, `key`, "
    "`parent`, `tokens`, `bytes`, `created_ns`, `used_ns` (null: not known), `parent_stored`, "
    "`children_stored`, `damage` (null: intact), `header` (null: cannot be read), and with "
    "`--tokens` the `token_ids`",
}

MOST_SHOWN = 20


def inspect(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="Its first 4 or more digits, as ls shows them.")
    ],
    config: storage.ConfigOption = None,
    tier: storage.TierOption = None,
    path: storage.PathOption = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show the token ids too: that is the prompt.")
    ] = False,
    as_json: loading.JsonOption = False,
) -> None:
    """Show one stored chunk, and whether it is intact.

    Prints its header and its place in the chain, and reads all of it to compare the checksums.
    Exit code 3 if it is damaged.
    """
    with storage.places(config, tier, path) as found:
        hits = storage.find_chunks(found, key)
        if not hits:
            found.finish()
            raise TierKVError(
                f"no stored chunk's key begins with {key}; 'tierkv ls NAMESPACE' lists them"
            )
        if len({chunk.key for _, _, chunk in hits}) > 1:
            for _, summary, chunk in hits[:MOST_SHOWN]:
                output.message(f"{summary.tier}  {chunk.key.hex()}")
            raise typer.BadParameter(f"{len(hits)} keys begin with {key}; give more digits")
        described = [_describe(*hit, tokens=tokens) for hit in hits]
        if as_json:
            output.result_json({"chunks": described})
        else:
            for number, fields in enumerate(described):
                if number:
                    output.result("")
                _print(fields)
        _finish(found, any(fields["damage"] for fields in described))


def _finish(found: Places, is_damaged: bool) -> None:
    if is_damaged:
        output.message("tierkv: damaged; 'tierkv verify --repair' drops it, as a load would")
        raise typer.Exit(3)
    found.finish()


def _describe(
    inventory: Inventory, summary: NamespaceSummary, chunk: StoredChunk, *, tokens: bool
) -> dict[str, Any]:
    """All that is known of a chunk."""
    near = list(inventory.chunks(summary.name))
    problem = inventory.check(chunk)
    header: RecordHeader | None
    try:
        header = inventory.header(chunk)
    except FormatError:
        header = None
    fields: dict[str, Any] = {
        "tier": summary.tier,
        "place": inventory.place,
        "namespace": summary.digest,
        "model": summary.model or None,
        **storage.chunk_json(chunk),
        "parent_stored": any(each.key == chunk.parent for each in near),
        "children_stored": sum(each.parent == chunk.key for each in near),
        "damage": problem.reason if problem else None,
        "header": None if header is None else _header(header),
    }
    if tokens and header is not None:
        fields["token_ids"] = memoryview(header.tokens).cast("i").tolist()
    return fields


def _header(header: RecordHeader) -> dict[str, Any]:
    from tierkv.codecs import KNOWN_CODECS

    names = {number: name for name, (number, _) in KNOWN_CODECS.items()}
    return {
        "codec": names.get(header.codec_id, f"number {header.codec_id}"),
        "codec_id": header.codec_id,
        "header_bytes": header.header_bytes,
        "ranks": header.ranks,
        "chunk_tokens": header.chunk_tokens,
        "block_tokens": header.block_tokens,
        "part_bytes": header.part_bytes,
        "raw_bytes": header.raw_bytes,
        "stored_bytes": header.stored_bytes,
        "sequence": header.sequence,
        "payload_checksum": f"{header.payload_checksum:016x}",
        "content_key": header.content_key.hex(),
    }


def _print(fields: dict[str, Any]) -> None:
    now = time.time_ns()
    header = fields["header"]
    lines = {
        "tier": f"{fields['tier']} in {fields['place']}",
        "namespace": fields["namespace"],
        "model": fields["model"] or columns.NOTHING,
        "key": fields["key"],
        "parent": fields["parent"]
        + (" (stored too)" if fields["parent_stored"] else " (not stored: first, or evicted)"),
        "children": str(fields["children_stored"]),
        "written": _ago(fields["created_ns"], now),
        "used": _ago(fields["used_ns"], now),
        "tokens": f"{fields['tokens']:,}",
        "size": f"{columns.size(fields['bytes'])} ({fields['bytes']:,} bytes)",
        "payload": f"damaged: {fields['damage']}" if fields["damage"] else "intact",
    }
    if header is not None:
        raw = header["raw_bytes"]
        lines |= {
            "codec": f"{header['codec']}, {header['stored_bytes'] / raw:.0%} of {raw:,} bytes",
            "geometry": f"{columns.count(header['ranks'], 'rank')}, blocks of "
            f"{header['block_tokens']} tokens, {header['part_bytes']:,} bytes a rank",
            "sequence": str(header["sequence"]),
            "checksum": header["payload_checksum"],
            "content key": header["content_key"],
        }
    if "token_ids" in fields:
        lines["token ids"] = " ".join(map(str, fields["token_ids"]))
    for name, text in lines.items():
        output.result(f"{output.styled(f'{name:<12}', 'bold')}{text}")


def _ago(then_ns: int | None, now: int) -> str:
    return columns.NOTHING if not then_ns else f"{columns.age(then_ns, now)} ago"
