# SPDX-License-Identifier: Apache-2.0
"""`tierkv bench tiers` with sizes so small that only its doing is tested, not its figures."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.redis_kit import RedisServer, needs_redis
from tests.unit.cli.storage_kit import redis_of
from tierkv.bench.ratio import Ratio
from tierkv.bench.tiers import _row
from tierkv.cli.app import run

Captured = pytest.CaptureFixture[str]
SMALL = ["--size", "1MiB", "--kv-per-token", "1KiB", "--repeats", "2"]


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIERKV_CONFIG", raising=False)


def read(capsys: Captured, *arguments: str, code: int = 0) -> Any:
    assert run(["bench", "tiers", *SMALL, *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_dram_and_disk_are_measured_beside_their_limits(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "disk").mkdir()
    printed = read(capsys, "--path", str(tmp_path / "disk"))
    assert printed["ok"]
    assert printed["token_bytes"] == 1024
    assert [(each["tier"], each["op"]) for each in printed["tiers"]] == [
        ("dram", "load"), ("dram", "save"), ("disk", "load"), ("disk", "save"),
    ]  # fmt: skip
    for each in printed["tiers"]:
        assert each["bytes_per_s"] > 0
        assert each["limit_bytes_per_s"] > 0
        assert each["tokens_per_s"] == pytest.approx(each["bytes_per_s"] / 1024, abs=1)
    assert printed["ratios"].keys() == {
        "dram_load_over_limit", "dram_save_over_limit",
        "disk_load_over_limit", "disk_save_over_limit",
    }  # fmt: skip
    assert {ratio["repeats"] for ratio in printed["ratios"].values()} == {2}
    assert list((tmp_path / "disk").iterdir()) == []


def test_the_table_names_the_limits(tmp_path: Path, capsys: Captured) -> None:
    assert run(["bench", "tiers", *SMALL, "--tier", "disk", "--path", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["tier", "op", "GB/s", "tokens/s", "limit", "GB/s", "share", "limit"]
    assert lines[1].startswith("disk  load  ")
    assert lines[1].endswith("8 at once")
    assert lines[2].endswith("one by one")


@needs_redis
def test_redis_is_measured_and_left_as_it_was(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer(tmp_path / "redis", requirepass="geheim") as server:
        monkeypatch.setenv("REDISCLI_AUTH", "geheim")
        monkeypatch.setenv("PW", "geheim")
        Path("tierkv.yaml").write_text(
            "key_secret: {env: PW}\ntiers:\n  - {type: dram, capacity: 1MiB}\n"
            f"  - {{type: redis, url: '{server.url}', password: {{env: PW}}}}\n"
        )
        printed = read(capsys, "--tier", "redis")
        assert [each["limit"] for each in printed["tiers"]] == ["bare sockets, 8 at once"] * 2
        assert all(ratio["median"] > 0 for ratio in printed["ratios"].values())
        # `cli` of the kit passes no variables on, so this asks with the password.
        assert server.cli("-a", "geheim", "--no-auth-warning", "DBSIZE") in ("0", "1")
        left = server.cli("-a", "geheim", "--no-auth-warning", "KEYS", "*")
        assert left == "" or left.endswith(":generation")


@needs_redis
@pytest.mark.parametrize("kind", ["tls", "unix", "cluster"])
def test_each_kind_of_server_is_measured(
    kind: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PW", "x")
    with ExitStack() as stack:
        url, more = redis_of(kind, tmp_path, stack)
        Path("tierkv.yaml").write_text(
            "key_secret: {env: PW}\ntiers:\n  - {type: dram, capacity: 1MiB}\n"
            f"  - {{type: redis, url: '{url}'{more}}}\n"
        )
        load, save = read(capsys, "--tier", "redis")["tiers"]
    assert load["bytes_per_s"] > 0
    # A cluster has no single server to compare with.
    assert (load["limit"] is None) == (save["limit"] is None) == (kind == "cluster")


def test_a_server_that_is_not_there_is_told_and_the_others_are_measured(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PW", "x")
    monkeypatch.setattr("tierkv.bench.redis.READY_SECONDS", 0.01)
    Path("tierkv.yaml").write_text(
        "key_secret: {env: PW}\ntiers:\n  - {type: dram, capacity: 1MiB}\n"
        "  - {type: redis, url: 'redis://127.0.0.1:1/0'}\n"
    )
    assert run(["bench", "tiers", *SMALL]) == 1
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3
    assert printed.err == (
        "tierkv: redis: redis://127.0.0.1:1/0: cannot be reached; 'tierkv doctor' looks closer\n"
    )


@pytest.mark.parametrize(
    "arguments", [["--size", "12"], ["--size", "100B"], ["--tier", "nix"], ["--repeats", "0"]]
)
def test_values_that_mean_nothing_are_2(arguments: list[str], capsys: Captured) -> None:
    assert run(["bench", "tiers", *arguments]) == 2
    assert capsys.readouterr().out == ""


def test_a_disk_without_room_is_told(tmp_path: Path, capsys: Captured) -> None:
    assert run(["bench", "tiers", "--path", str(tmp_path), "--tier", "disk", "--size", "9TiB"]) == 1
    assert "too little to measure with; give less --size" in capsys.readouterr().err


def test_the_first_turn_warms_up_and_medians_count() -> None:
    turns = {"load": [99.0, 2.0, 4.0, 3.0], "plain": [1.0, 1.0, 1.0, 3.0]}
    row = _row("disk", "load", turns, "load", "plain", "memcpy", 600)
    assert (row.bytes_per_s, row.limit_bytes_per_s) == (200.0, 600.0)
    assert row.share == Ratio.of([0.5, 0.25, 1.0])
    assert row.share.median == 0.5
    bare = _row("redis", "load", turns, "load", "missing", "", 600)
    assert (bare.share, bare.limit_bytes_per_s) == (None, None)
