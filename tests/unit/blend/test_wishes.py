# SPDX-License-Identifier: Apache-2.0
"""What an operator and a request may say about any-text reuse."""

from __future__ import annotations

from typing import Any

import pytest
from tierkv_vllm.options import parse

from tierkv.config import load_config
from tierkv.errors import ConfigError


def blend(**values: Any) -> Any:
    tiers = [{"type": "dram", "capacity": "1MiB"}]
    return load_config(inline={"version": 1, "tiers": tiers, "blend": values}).config.blend


def test_it_is_off_unless_it_is_switched_on() -> None:
    config = load_config(inline={"version": 1, "tiers": [{"type": "dram", "capacity": "1MiB"}]})
    assert config.config.blend.mode == "off"
    # The word off is a truth value in YAML.
    assert blend(mode=False).mode == "off"
    assert blend(mode="balanced").mode == "balanced"


def test_values_have_the_documented_defaults() -> None:
    config = blend(mode="fast")
    of_the_mode = (config.anchor_tokens, config.sample_every, config.recompute_ratio)
    assert of_the_mode == (None, None, None)
    assert (config.min_tokens, config.exact_after, config.shadow) == (256, 2, 0.0)
    assert config.max_prompt_bytes == 4 << 30


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "on"),
        ("mode", True),
        ("anchor_tokens", -1),
        ("anchor_tokens", 1025),
        ("sample_every", -1),
        ("sample_every", 1025),
        ("recompute_ratio", -0.1),
        ("recompute_ratio", 1.1),
        ("min_tokens", 0),
        ("exact_after", -1),
        ("max_blend_tokens_per_step", 0),
        ("max_donors", 0),
        ("shadow", 1.5),
        ("ratio", 0.1),
    ],
)
def test_a_value_that_makes_no_sense_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"blend\.{name}"):
        blend(**{name: value})


@pytest.mark.parametrize("mode", ["off", "fast", "balanced", "quality"])
def test_a_request_may_choose_its_mode(mode: str) -> None:
    options, problems = parse({"tierkv": {"blend": mode}})
    assert (options.blend, problems) == (mode, [])
    assert options.load
    assert options.save


@pytest.mark.parametrize("value", ["on_request", "on", True, None, 3, ["fast"], {"mode": "fast"}])
def test_another_choice_is_ignored_and_named(value: Any) -> None:
    options, (problem,) = parse({"tierkv": {"blend": value, "save": False}})
    assert options.blend is None
    assert options.save is False
    assert "kv_transfer_params.tierkv.blend" in problem
    assert "off, fast, balanced, quality" in problem
