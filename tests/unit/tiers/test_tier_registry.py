# SPDX-License-Identifier: Apache-2.0
"""From a configuration to a tier: known types, entry points, and what is missing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest

from tierkv.config.models import DiskConfig, LowerTierConfig
from tierkv.errors import ConfigError
from tierkv.tiers import registry
from tierkv.tiers.disk.tier import DiskTier
from tierkv.tiers.registry import KNOWN_TIERS, KnownTier, make_tier


class TapeConfig(LowerTierConfig):
    """A type of tier that TierKV does not know."""

    summary: ClassVar[str] = "A tape."
    type: str = "tape"


def tape() -> TapeConfig:
    return TapeConfig(name="tape")


def test_a_known_type_makes_its_tier(tmp_path: Path) -> None:
    tier = make_tier(DiskConfig(path=tmp_path / "kv", name="nvme", capacity=1 << 20))
    assert isinstance(tier, DiskTier)
    assert tier.name == "nvme"
    assert not (tmp_path / "kv").exists()


def test_an_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown tier type 'tape'; choose one of .*disk"):
        make_tier(tape())


def test_a_tier_of_another_package_is_found_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("tape", "tests.unit.store.rig:ScriptedTier", "tierkv.tiers")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert make_tier(tape()).name == "tape"


def test_a_missing_package_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = KnownTier("no_such_package_here.tier:Tape", "pip install 'tierkv[tape]'")
    monkeypatch.setitem(KNOWN_TIERS, "tape", known)
    with pytest.raises(
        ConfigError,
        match=r"tape tier needs no_such_package_here.*: pip install 'tierkv\[tape\]'$",
    ):
        make_tier(tape())


def test_the_registry_imports_no_tier_before_one_is_made() -> None:
    code = "import sys, tierkv.tiers.registry, tierkv.policies; print(*sorted(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "tierkv.tiers.registry" in modules
    assert not any(
        name.startswith(("tierkv.tiers.disk", "tierkv.policies.lru")) for name in modules
    )
    assert "torch" not in modules
