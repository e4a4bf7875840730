# SPDX-License-Identifier: Apache-2.0
"""The stats socket: who may open it, what it says, and that nothing a client does hurts."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.unit.stats.fake_engine import FakeEngine
from tierkv.stats import client, discovery
from tierkv.stats.protocol import MAX_REQUEST, FrameError, StatsError, Unpacker, pack
from tierkv.stats.publisher import INTERVAL, Publisher
from tierkv.stats.server import MAX_CLIENTS, StatsServer


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """A runtime directory and a temporary one of this test's own."""
    with tempfile.TemporaryDirectory(prefix="tk-") as short:
        runtime, temporary = Path(short) / "run", Path(short) / "tmp"
        runtime.mkdir(mode=0o700)
        temporary.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        monkeypatch.setattr("tierkv.stats.discovery.gettempdir", lambda: str(temporary))
        yield runtime, temporary


@pytest.fixture
def server() -> Iterator[tuple[StatsServer, Publisher]]:
    found = FakeEngine().serve()
    yield found
    found[0].close()


def test_the_socket_and_its_directory_are_the_owners_alone(
    places: tuple[Path, Path], server: tuple[StatsServer, Publisher]
) -> None:
    path = server[0].path
    assert path == places[0] / "tierkv" / f"{os.getpid()}.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_without_a_runtime_directory_it_lies_in_the_temporary_one(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    server, _ = FakeEngine().serve()
    try:
        assert server.path is not None
        assert server.path.parent == places[1] / f"tierkv-{os.getuid()}"
        # Who has the variable finds it all the same.
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(places[0]))
        assert discovery.find() == [server.path]
    finally:
        server.close()


@pytest.mark.parametrize("spoil", ["open", "file", "link", "missing", "long"])
def test_a_place_that_is_not_safe_is_passed_over(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    runtime, temporary = places
    directory = runtime / "tierkv"
    if spoil == "open":
        directory.mkdir()
        directory.chmod(0o755)
    elif spoil == "file":
        directory.write_text("")
    elif spoil == "link":
        directory.symlink_to(temporary)
    elif spoil == "missing":
        runtime.rmdir()
    else:
        long = runtime / ("x" * 100)
        long.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert discovery.make_directory() == temporary / f"tierkv-{os.getuid()}"


def test_with_no_place_at_all_it_says_what_to_do(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    directory = places[1] / f"tierkv-{os.getuid()}"
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(StatsError, match=f"run: chmod 700 {directory}; set XDG_RUNTIME_DIR"):
        discovery.make_directory()


def test_two_engines_in_one_process_are_both_found_and_the_dead_ones_swept() -> None:
    first, _ = FakeEngine().serve()
    second, _ = FakeEngine().serve()
    directory = discovery.make_directory()
    dead = directory / "999999999.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead))  # and never listens
    (directory / "note.txt").write_text("not ours")
    try:
        assert first.path is not None
        assert second.path is not None
        assert second.path.name == f"{os.getpid()}-2.sock"
        assert discovery.find() == sorted([first.path, second.path])
        assert not dead.exists()
        assert (directory / "note.txt").exists()
        found = client.engines()
        assert [engine.path for engine in found] == sorted([first.path, second.path])
        for engine in found:
            engine.close()
    finally:
        first.close()
        second.close()
    assert discovery.find() == []
    first.close()  # again


def test_it_tells_who_it_is_its_counters_and_its_requests(
    server: tuple[StatsServer, Publisher],
) -> None:
    with_socket = client.only_engine()
    try:
        assert with_socket.info["model"] == "llama-8b"
        assert with_socket.info["pid"] == os.getpid()
        assert with_socket.info["control"] is False
        told = with_socket.request("snapshot")
        last = server[1].last
        assert last is not None
        assert told == {"time": last.time, "idle": False, "metrics": last.metrics}
        requests = client.request(with_socket, "requests", last=3)
        assert requests == [record.as_dict() for record in last.requests[-3:]]
        assert all(isinstance(request["request_id"], str) for request in requests)
    finally:
        with_socket.close()


@pytest.mark.parametrize(
    ("op", "arguments", "answer"),
    [
        ("sing", {}, "unknown request 'sing'; this engine and this tierkv differ"),
        ("requests", {"last": 0}, "last: must be 1 to 512"),
        ("requests", {"last": "all"}, "last: must be 1 to 512"),
        ("purge", {"all": True}, "this engine's socket is read-only; put 'stats: {control: true}'"),
    ],
)
def test_what_it_cannot_do_it_says_in_one_line(
    server: tuple[StatsServer, Publisher], op: str, arguments: dict[str, Any], answer: str
) -> None:
    engine = client.only_engine()
    with pytest.raises(StatsError) as caught:
        engine.request(op, **arguments)
    assert str(caught.value).startswith(f"engine {os.getpid()}: {answer}")
    assert "\n" not in str(caught.value)
    assert server[1].commands.empty()
    # It goes on answering.
    assert engine.request("info")["model"] == "llama-8b"
    engine.close()


def test_a_command_waits_for_the_scheduler_and_its_errors_come_back() -> None:
    server, publisher = FakeEngine().serve(control=True)
    engine = client.only_engine()

    def run(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if op == "pin":
            raise ValueError("say what")
        return {"op": op, **arguments}

    def scheduler() -> None:
        for _ in range(2):
            command = publisher.commands.get()
            publisher.commands.put(command)
            publisher.run_commands(run)

    thread = threading.Thread(target=scheduler)
    thread.start()
    try:
        assert engine.request("purge", all=True) == {"op": "purge", "all": True}
        with pytest.raises(StatsError, match="say what"):
            engine.request("pin")
    finally:
        thread.join()
        engine.close()
        server.close()


@pytest.mark.parametrize(
    "bytes_",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (MAX_REQUEST + 1).to_bytes(4, "big"),
        (3).to_bytes(4, "big") + msgpack.packb([1, 2]),
        (1).to_bytes(4, "big") + b"\xc1",
        pack({"op": "info"})[:-1] + b"\xc1",
    ],
    ids=["http", "too long", "no map", "no msgpack", "broken inside"],
)
def test_who_talks_nonsense_is_hung_up_on(
    server: tuple[StatsServer, Publisher], bytes_: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(str(server[0].path))
        sock.sendall(bytes_)
        assert sock.recv(100) == b""
    client.only_engine().close()


def test_more_clients_than_it_takes_are_turned_away_until_others_leave(
    server: tuple[StatsServer, Publisher],
) -> None:
    path = server[0].path
    assert path is not None
    engines = [client.connect(path) for _ in range(MAX_CLIENTS)]
    with pytest.raises(StatsError):
        client.connect(path)
    for engine in engines:
        engine.close()
    # It hears of their leaving before it hears of the next one.
    client.connect(path).close()


def test_who_looks_for_engines_is_told_how_to_start_or_choose_one() -> None:
    with pytest.raises(StatsError, match=r"no running engine .*\n.*vllm serve MODEL"):
        client.only_engine()
    first, _ = FakeEngine().serve()
    second, _ = FakeEngine().serve()
    pid = os.getpid()
    try:
        with pytest.raises(StatsError, match=f"choose one with --pid: {pid} .llama-8b"):
            client.only_engine()
        with pytest.raises(StatsError, match=f"no engine has the pid 1; running: {pid}"):
            client.only_engine(1)
    finally:
        first.close()
        second.close()


def test_an_engine_that_is_gone_is_said_to_be() -> None:
    server, _ = FakeEngine().serve()
    engine = client.only_engine()
    path = server.path
    assert path is not None
    server.close()
    with pytest.raises(StatsError, match=r"; is the engine still running\?$"):
        engine.request("snapshot")
    engine.close()
    with pytest.raises(StatsError, match=r"; is the engine still running\?$"):
        client.connect(path)


def test_frames_come_out_whole_however_they_are_cut() -> None:
    messages = [{"op": "a"}, {"op": "b", "x": [1, 2, {"y": None}]}, {}]
    stream = b"".join(map(pack, messages))
    for size in range(1, len(stream)):
        unpacker = Unpacker(100)
        got = []
        for start in range(0, len(stream), size):
            got += unpacker.feed(stream[start : start + size])
        assert got == messages
    with pytest.raises(FrameError):
        Unpacker(10).feed(pack({"op": "longer than that"}))


def test_a_snapshot_is_made_when_due_and_when_the_engine_becomes_idle() -> None:
    made: list[int] = []
    now = [100.0]

    def metrics() -> Any:
        made.append(1)
        return {}

    publisher = Publisher(metrics, tuple, clock=lambda: now[0])
    publisher.publish(idle=False)
    publisher.publish(idle=False)
    now[0] += INTERVAL / 2
    publisher.publish(idle=False)
    assert len(made) == 1
    publisher.publish(idle=True)  # it does not come back to say so later
    assert len(made) == 2
    publisher.publish(idle=True)
    assert len(made) == 2
    publisher.publish(idle=False)
    assert len(made) == 2
    publisher.publish(idle=True)
    assert len(made) == 3
    assert publisher.last is not None
    assert publisher.last.idle
    now[0] += INTERVAL
    publisher.publish(idle=False)
    assert len(made) == 4
    assert not publisher.last.idle
