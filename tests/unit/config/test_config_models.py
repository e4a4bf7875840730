# SPDX-License-Identifier: Apache-2.0
"""The models themselves, as code that builds them from Python sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tierkv.config import DiskConfig, DramConfig, SecretRef, TierKVConfig
from tierkv.config.base import LowerTierConfig
from tierkv.config.registry import TIER_MODELS
from tierkv.config.units import WRITTEN

GIB = 1 << 30


def config(**changes: Any) -> TierKVConfig:
    values: dict[str, Any] = {
        "tiers": (DramConfig(capacity=GIB), DiskConfig(path=Path("/x"), capacity=2 * GIB))
    }
    return TierKVConfig(**{**values, **changes})


def test_the_defaults_are_those_of_the_contract() -> None:
    disk = DiskConfig(path=Path("/x"), capacity=1)
    assert disk.model_dump() == {
        "type": "disk", "name": "disk", "path": Path("/x"), "capacity": 1, "policy": "lru",
        "min_free": 1_073_741_824, "write": "through", "codec": "raw", "recover": "quiet",
        "direct_io": "auto", "io_threads": 8, "load_deadline": 2.0, "save_deadline": 30.0,
        "write_queue": None, "breaker_failures": 5, "probe_after": 5.0,
    }  # fmt: skip
    dram = DramConfig(capacity=1)
    assert dram.model_dump() == {"type": "dram", "name": "dram", "capacity": 1, "policy": "lru"}
    whole = config()
    assert (whole.version, whole.key_secret, whole.chunk_tokens, whole.save) == (
        1,
        None,
        None,
        "all",
    )


def test_dram_and_lower_split_the_tiers() -> None:
    whole = config()
    assert whole.dram is whole.tiers[0]
    assert whole.lower == whole.tiers[1:]


def test_code_gives_bytes_and_seconds_but_a_file_must_write_units() -> None:
    disk = {"type": "disk", "path": "/x", "capacity": 1000, "load_deadline": 0.5}
    values = {"tiers": [{"type": "dram", "capacity": 1}, disk]}
    assert TierKVConfig.model_validate(values).lower[0].load_deadline == 0.5
    with pytest.raises(ValidationError) as caught:
        TierKVConfig.model_validate(values, context=WRITTEN)
    assert [error["loc"][-1] for error in caught.value.errors()] == [
        "capacity", "capacity", "load_deadline",
    ]  # fmt: skip


def test_what_is_dumped_as_json_is_what_a_file_may_hold() -> None:
    whole = config(key_secret=SecretRef(env="KEY"), chunk_tokens=128)
    dumped = whole.model_dump(mode="json", exclude_none=True)
    assert dumped["tiers"][1]["capacity"] == "2GiB"
    assert dumped["tiers"][1]["load_deadline"] == "2s"
    assert TierKVConfig.model_validate(dumped, context=WRITTEN) == whole


def test_nothing_can_be_changed_or_added() -> None:
    whole = config()
    with pytest.raises(ValidationError, match="frozen"):
        whole.save = "prompt"
    with pytest.raises(ValidationError, match="extra_forbidden"):
        DramConfig(capacity=1, size=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (SecretRef, {"file": "/x", "value": "geheim"}),
        (SecretRef, {"env": "geheim !"}),
        (DramConfig, {"capacity": "geheim", "pasword": "geheim"}),
        (DiskConfig, {"path": 0, "capacity": "geheim", "write": "geheim"}),
        (TierKVConfig, {"key_secret": "geheim", "tiers": "geheim"}),
    ],
)
def test_no_model_prints_the_input_it_refuses(model: type[Any], values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(values)
    # A unit error quotes what it read: a capacity is no place for a secret.
    lines = [line for line in str(caught.value).splitlines() if "is not a size" not in line]
    assert lines
    assert all("geheim" not in line for line in lines)


@pytest.mark.parametrize(
    ("tiers", "reason"),
    [
        ((), "the first tier must be dram"),
        ((DiskConfig(path=Path("/x"), capacity=1),), "the first tier must be dram"),
        ((DiskConfig(path=Path("/x"), capacity=1), DramConfig(capacity=1)), "must be first"),
        ((DramConfig(capacity=1), DramConfig(capacity=1)), "a second dram tier"),
        (
            (
                DramConfig(capacity=1),
                DiskConfig(path=Path("/x"), capacity=1),
                DiskConfig(path=Path("/y"), capacity=1),
            ),
            "tier 2: a tier named 'disk' stands above",
        ),
    ],
)
def test_tiers_that_do_not_stand_together_are_refused(tiers: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        TierKVConfig(tiers=tiers)


@pytest.mark.parametrize("name", ["a", "fast_ssd", "disk2", "a" * 32])
def test_a_tier_may_be_called(name: str) -> None:
    assert DramConfig(capacity=1, name=name).name == name


@pytest.mark.parametrize("name", ["", "2a", "a__b", "_a", "a_", "A", "a-b", "é", "a" * 33, "a\n"])
def test_a_tier_may_not_be_called(name: str) -> None:
    with pytest.raises(ValidationError, match="is not a tier name"):
        DramConfig(capacity=1, name=name)


def test_a_path_is_absolute_and_the_tilde_is_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert DiskConfig(path=Path("~/kv"), capacity=1).path == Path("/home/somebody/kv")
    with pytest.raises(ValidationError, match="is not an absolute path"):
        DiskConfig(path=Path("kv"), capacity=1)


@pytest.mark.parametrize("kind", TIER_MODELS)
def test_every_registered_tier_carries_its_type_and_describes_every_field(kind: str) -> None:
    model = TIER_MODELS[kind]
    assert model.model_fields["type"].default == kind
    assert model.model_fields["name"].default == kind
    for name, field in model.model_fields.items():
        assert field.description, name
        assert not field.is_required() or field.examples, f"{name} needs an example to advise"
    assert kind == "dram" or issubclass(model, LowerTierConfig)
