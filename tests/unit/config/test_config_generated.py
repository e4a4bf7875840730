# SPDX-License-Identifier: Apache-2.0
"""What is written from the models is up to date, and what is shipped is valid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tierkv.config import TierKVConfig, load_config
from tierkv.config.reference import reference_text
from tierkv.config.registry import TIER_MODELS
from tierkv.config.sample import sample_text
from tierkv.config.schema import json_schema, schema_text

ROOT = Path(__file__).parents[3]
SAMPLES = sorted((ROOT / "configs").glob("*.yaml"))


def problems(value: Any) -> list[str]:
    return [error.message for error in Draft202012Validator(json_schema()).iter_errors(value)]


def test_the_schema_file_is_up_to_date() -> None:
    stored = (ROOT / "configs" / "tierkv.schema.json").read_text()
    assert stored == schema_text(), "run: tierkv check --schema > configs/tierkv.schema.json"


def test_the_reference_page_is_up_to_date() -> None:
    stored = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    command = "python -m tierkv.config.reference > docs/reference/configuration.md"
    assert stored == reference_text(), f"run: {command}"
    assert command in stored


def test_the_reference_page_has_a_row_for_every_key() -> None:
    page = reference_text()
    for kind, model in TIER_MODELS.items():
        section = page.partition(f"## Tier `{kind}`")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(model.model_fields)


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(json.loads(schema_text()))


@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.name)
def test_every_shipped_configuration_is_valid(file: Path) -> None:
    assert load_config(file, environ={}, strict=True).config.dram.capacity > 0
    assert problems(yaml.safe_load(file.read_text())) == []
    assert file.read_text().startswith("# yaml-language-server: $schema=tierkv.schema.json\n")


def test_there_are_shipped_configurations() -> None:
    assert {"minimal.yaml", "local-disk.yaml"} <= {file.name for file in SAMPLES}


@pytest.mark.parametrize(
    ("change", "is_valid"),
    [
        ({}, True),
        ({"capacity": "${SIZE}"}, True),
        ({"io_threads": "${THREADS:-4}"}, True),
        ({"key": 1}, False),
        ({"capacity": 32}, False),
        ({"capacity": "32G"}, False),
        ({"load_deadline": 5}, False),
        ({"write": "of"}, False),
        ({"type": "tape"}, False),
        ({"type": None}, False),
        ({"io_threads": 257}, False),
    ],
)
def test_the_schema_judges_a_file_as_the_loader_does(
    change: dict[str, Any], is_valid: bool, tmp_path: Path
) -> None:
    disk = {"type": "disk", "path": "/x", "capacity": "1TiB", **change}
    disk = {key: value for key, value in disk.items() if value is not None}
    whole = {"tiers": [{"type": "dram", "capacity": "1GiB"}, disk]}
    assert (problems(whole) == []) is is_valid
    file = tmp_path / "t.yaml"
    file.write_text(yaml.safe_dump(whole))
    environ = {"SIZE": "1GiB", "THREADS": "4"}
    if is_valid:
        load_config(file, environ=environ)
    else:
        with pytest.raises(Exception, match=str(file)):
            load_config(file, environ=environ)


def test_the_sample_is_valid_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(sample_text("3GiB"))
    config = load_config(file, environ={}, strict=True).config
    assert [tier.capacity for tier in config.tiers] == [3 << 30]


def test_the_sample_holds_every_key_and_its_default_behind_a_comment_sign() -> None:
    text = re.sub(r"^  #(?=- |  )", "  ", sample_text("3GiB"), flags=re.M)  # tiers below DRAM
    text = re.sub(r"^( *)#(?=[a-z_]+:)", r"\1", text, flags=re.M)  # single keys
    written = yaml.safe_load(text)
    assert written.keys() == TierKVConfig.model_fields.keys()
    assert [tier["type"] for tier in written["tiers"]] == list(TIER_MODELS)
    for tier, model in zip(written["tiers"], TIER_MODELS.values(), strict=True):
        assert tier.keys() == model.model_fields.keys()
        for name, field in model.model_fields.items():
            if field.default is None:  # what stands there is an example; some exclude each other
                del tier[name]
    loaded = load_config(inline=written, environ={})
    needed = [
        {name: tier[name] for name, field in model.model_fields.items() if field.is_required()}
        for tier, model in zip(written["tiers"], TIER_MODELS.values(), strict=True)
    ]
    plain = [{"type": kind, **values} for kind, values in zip(TIER_MODELS, needed, strict=True)]
    whole = load_config(inline={**written, "tiers": plain}, environ={})
    assert loaded.config == whole.config, "a written default is not the default"
