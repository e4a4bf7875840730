# SPDX-License-Identifier: Apache-2.0
"""Who may use the tier's directory: modes, owners, links, and one engine at a time."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.unit.tiers.disk_kit import (
    CHUNKS,
    FOLDER,
    LAYOUT,
    NAMESPACE,
    make_config,
    opened,
    run,
    save,
)
from tierkv.errors import LockedError, TierError
from tierkv.tiers.disk import DiskTier
from tierkv.tiers.disk.directory import Directory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    config = make_config(tmp_path / "new" / "parent")

    async def test() -> None:
        tier, _ = await opened(config)
        await save(tier, CHUNKS[0])
        await tier.close()

    before = os.umask(umask)
    try:
        run(test)
    finally:
        os.umask(before)
    for path in (config.path, config.path / FOLDER, config.path.parent):
        assert mode(path) == 0o700
    files = [config.path / "lock", *(config.path / FOLDER).iterdir()]
    assert sorted(path.name for path in files) == ["lock", "slab", "table", "used"]
    assert {mode(path) for path in files} == {0o600}


def test_files_that_became_readable_are_made_private_again(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    Directory.open(config.path, "disk").close()

    async def test() -> None:
        for _ in range(2):
            tier, _ = await opened(config)
            await tier.close()
            (config.path / FOLDER / "slab").chmod(0o644)
        tier, _ = await opened(config)
        await tier.close()

    run(test)
    assert mode(config.path / FOLDER / "slab") == 0o600


@pytest.mark.parametrize("bits", [0o020, 0o002])
def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, bits: int) -> None:
    tmp_path.chmod(0o700 | bits)
    with pytest.raises(TierError) as caught:
        Directory.open(tmp_path, "nvme")
    assert str(caught.value) == (
        f"nvme: {tmp_path} can be written by others; chmod go-w {tmp_path}"
    )
    tmp_path.chmod(0o700)
    Directory.open(tmp_path, "nvme").close()


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: only root can give a directory away")
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(TierError) as caught:
        Directory.open(tmp_path, "disk")
    assert str(caught.value) == (
        f"disk: {tmp_path} belongs to uid 12345, not to uid 0 of this process; "
        f"chown 0 {tmp_path}, or set path to another directory"
    )


def test_a_symbolic_link_is_refused_with_the_real_path(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    with pytest.raises(TierError, match=f"{link} is a symbolic link; set path: {real}"):
        Directory.open(link, "disk")


@pytest.mark.parametrize("name", ["slab", "table", "used"])
def test_a_planted_link_is_not_followed(tmp_path: Path, name: str) -> None:
    config = make_config(tmp_path)
    folder = config.path / FOLDER
    folder.mkdir(parents=True, mode=0o700)
    config.path.chmod(0o700)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (folder / name).symlink_to(victim)

    async def test() -> None:
        with pytest.raises(TierError, match="cannot be used"):
            await opened(config)

    run(test)
    assert victim.read_bytes() == b"precious"


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(b"")
    with pytest.raises(TierError, match="Not a directory"):
        Directory.open(tmp_path / "kv", "disk")
    with pytest.raises(TierError, match="Not a directory"):
        Directory.open(tmp_path / "kv" / "below", "disk")


def test_a_second_tier_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    async def test() -> None:
        tier, _ = await opened(config)
        with pytest.raises(LockedError) as caught:
            await opened(config)
        assert caught.value.holder == os.getpid()
        assert str(caught.value) == (
            f"disk: {config.path} is in use by process {os.getpid()}; give this engine a "
            f"directory of its own, such as path: {config.path}/engine-2"
        )
        # And a sub-directory does work, beside the first.
        other, _ = await opened(make_config(config.path))
        await other.close()
        await tier.close()
        again, _ = await opened(config)
        await again.close()

    run(test)


def test_a_forked_child_does_not_keep_the_directory_locked(tmp_path: Path) -> None:
    directory = Directory.open(tmp_path / "kv", "disk")
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go_on[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        directory.close()
        Directory.open(tmp_path / "kv", "disk").close()
    finally:
        os.write(go_on[1], b"x")
        os.waitpid(child, 0)
        for fd in (*ready, *go_on):
            os.close(fd)


def test_a_failed_open_leaves_nothing_open(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (config.path / FOLDER / "table").mkdir(parents=True)
    config.path.chmod(0o700)
    (config.path / FOLDER).chmod(0o700)
    before = set(os.listdir("/proc/self/fd"))

    async def test() -> None:
        for _ in range(3):
            with pytest.raises(TierError):
                await DiskTier(config).open(NAMESPACE, LAYOUT)

    run(test)
    assert set(os.listdir("/proc/self/fd")) == before


def test_closing_closes_every_file(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))

    async def test() -> None:
        tier, _ = await opened(make_config(tmp_path))
        await save(tier, CHUNKS[0])
        await tier.close()

    run(test)
    assert set(os.listdir("/proc/self/fd")) == before
