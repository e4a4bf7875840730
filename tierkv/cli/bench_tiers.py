# SPDX-License-Identifier: Apache-2.0
"""`tierkv bench tiers`: what DRAM, disk and Redis do here, beside the limits of each."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.cli import columns, loading, output, progress, storage
from tierkv.errors import TierKVError

if TYPE_CHECKING:
    from tierkv.bench.tiers import Row, Size
    from tierkv.config import TierConfig

EXAMPLE = """\
  tierkv bench tiers
  tierkv bench tiers --path /mnt/nvme --size 2GiB
  tierkv bench tiers --config tierkv.yaml --kv-per-token 320KiB --json"""

JSON = {
    "ok": "whether all tiers could be measured",
    "tierkv, machine, date": "what was measured, where and when",
    "token_bytes": "KV of a token, as given",
    "ratios": "`TIER_OP_over_limit` to `median`, `spread` (of the quartiles) and `repeats`",
    "tiers": "list of `tier`, `op` (`load`, `save`), `bytes_per_s`, `tokens_per_s`, `limit` (in "
    "words) and `limit_bytes_per_s` (null: not measured)",
    "notes, failures": "lists of sentences",
}


def bench_tiers(
    config: storage.ConfigOption = None,
    tier: storage.TierOption = None,
    path: Annotated[
        Path | None,
        typer.Option("--path", metavar="DIR", help="Measure a disk here, configured or not."),
    ] = None,
    size: Annotated[str, typer.Option("--size", help="Bytes moved in each turn.")] = "512MiB",
    kv_per_token: Annotated[
        str,
        typer.Option("--kv-per-token", help="KV of one token; 128KiB is an 8B model's in 16 bits."),
    ] = "128KiB",
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=100, help="Turns each.")] = 5,
    as_json: loading.JsonOption = False,
) -> None:
    """Measure this machine's DRAM, disk and Redis through TierKV's own tiers.

    Beside each stands what the same medium gives without TierKV: memcpy, plain reads and writes of
    the same file, bare sockets. "tokens/s" is what the speed means in tokens: loading pays where
    the engine computes fewer than that a second.

    Works in a directory of its own beside the configured one, and under keys of its own in Redis;
    both are removed. Run it while nothing else works the machine.
    """
    from tierkv.bench.tiers import Size, steps

    wanted = Size(_bytes("--kv-per-token", kv_per_token), _bytes("--size", size), repeats)
    tiers = _tiers(config, tier, path)
    output.quiet()
    rows: list[Row] = []
    failed: list[str] = []
    notes: list[str] = []
    with progress.bar("measuring", steps(tiers, wanted)) as tell:
        for each in tiers:
            try:
                rows += _measure(each, wanted, tell, notes)
            except TierKVError as error:
                failed.append(str(error))
    if as_json:
        output.result_json(_json(rows, wanted.token_bytes, failed, notes))
    else:
        _print(rows, wanted.token_bytes)
    for text in notes:
        output.message(f"note: {text}")
    for text in failed:
        output.message(f"tierkv: {text}")
    if failed:
        raise typer.Exit(1)


def _bytes(option: str, text: str) -> int:
    from tierkv.config.units import parse_size

    try:
        value = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    if value < 1024:
        raise typer.BadParameter("at least 1KiB", param_hint=option)
    return value


def _tiers(config: Path | None, tier: str | None, path: Path | None) -> list[TierConfig]:
    """What to measure: the configuration's tiers; with `path` DRAM and a disk there."""
    from tierkv.config import DiskConfig

    loaded = loading.load(None, config, check_machine=False, json_list=None)
    tiers = list(loaded.config.tiers)
    if path is not None:
        disk = DiskConfig.model_validate({"path": path.absolute(), "capacity": 1 << 40})
        tiers = [each for each in tiers if not isinstance(each, DiskConfig)] + [disk]
    chosen = [each for each in tiers if tier in (None, each.name)]
    if not chosen:
        names = ", ".join(each.name for each in tiers)
        raise typer.BadParameter(f"no tier is named {tier!r}; those to measure: {names}")
    return chosen


def _measure(
    tier: TierConfig,
    size: Size,
    tell: Callable[[int], None],
    notes: list[str],
) -> list[Row]:
    from tierkv.bench import tiers as measuring
    from tierkv.config import DiskConfig
    from tierkv.config.redis import RedisConfig

    try:
        if tier.type == "dram":
            return measuring.measure_dram(tier.name, size, tell)
        if isinstance(tier, DiskConfig):
            return measuring.measure_disk(tier, size, tell, notes)
        if isinstance(tier, RedisConfig):
            return measuring.measure_redis(tier, size, tell)
    except ModuleNotFoundError as missing:
        remedy = "vllm" if missing.name == "torch" else "redis"
        raise TierKVError(
            f"{tier.name}: needs {missing.name}; run: pip install 'tierkv[{remedy}]'"
        ) from missing
    raise TierKVError(f"{tier.name}: a {tier.type} tier is not measured; choose others with --tier")


def _print(rows: list[Row], token_bytes: int) -> None:
    cells = [
        (
            row.tier,
            row.op,
            f"{row.bytes_per_s / 1e9:.2f}",
            f"{row.bytes_per_s / token_bytes:,.0f}",
            columns.NOTHING
            if row.limit_bytes_per_s is None
            else f"{row.limit_bytes_per_s / 1e9:.2f}",
            columns.NOTHING
            if row.share is None
            else f"{row.share.median:.0%} ± {row.share.spread:.0%}",
            row.limit or "not measured",
        )
        for row in rows
    ]
    if cells:
        head = ("tier", "op", ">GB/s", ">tokens/s", ">limit GB/s", ">share", "limit")
        for line in columns.table(head, cells):
            output.result(line)


def _json(
    rows: list[Row], token_bytes: int, failed: list[str], notes: list[str]
) -> dict[str, object]:
    from tierkv import __version__

    return {
        "ok": not failed,
        "tierkv": __version__,
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "token_bytes": token_bytes,
        "ratios": {
            f"{row.tier}_{row.op}_over_limit": asdict(row.share)
            for row in rows
            if row.share is not None
        },
        "tiers": [
            {
                "tier": row.tier,
                "op": row.op,
                "bytes_per_s": round(row.bytes_per_s),
                "tokens_per_s": round(row.bytes_per_s / token_bytes),
                "limit": row.limit or None,
                "limit_bytes_per_s": row.limit_bytes_per_s and round(row.limit_bytes_per_s),
            }
            for row in rows
        ],
        "notes": notes,
        "failures": failed,
    }
