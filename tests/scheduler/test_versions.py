# SPDX-License-Identifier: Apache-2.0
"""The connector fits the interface of every vLLM release it admits; no engine is needed.

`tests/data/connector_signatures.json` holds what those releases ask for; it is written from their
wheels by `tests/data/make_signatures.py`.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import vllm
from tierkv_vllm.compat import NEWEST, OLDEST, check_version
from tierkv_vllm.connector import TierKVConnector

from tierkv.errors import UnsupportedError

DATA = Path(__file__).parents[1] / "data"
TABLE: dict[str, Any] = json.loads((DATA / "connector_signatures.json").read_text())
pytestmark = pytest.mark.feature("vLLM 0.30 to 0.33: signatures")


def own(name: str) -> bool:
    return name in vars(TierKVConnector)


def problems(method: str, wanted: dict[str, Any]) -> str:
    """Why a call as that release makes it would fail; empty if it would not."""
    found = inspect.getattr_static(TierKVConnector, method)
    if wanted["property"] or isinstance(found, property):
        return "" if wanted["property"] == isinstance(found, property) else "property or not?"
    signature = inspect.signature(getattr(TierKVConnector, method))
    bound_to_self = not isinstance(found, classmethod | staticmethod)
    plain = [p for p in wanted["parameters"] if not p.startswith("*")]
    names = [p.rstrip("=") for p in plain]
    positional = [object()] * bound_to_self + [object()] * len(names)
    ours = [p for p in signature.parameters if p != "self"]
    takes_more = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    try:
        signature.bind(*positional)
        if any(p.startswith("**") for p in wanted["parameters"]) and not takes_more:
            return f"{signature} takes no further keywords"
    except TypeError as error:
        return f"{signature}: {error}"
    # Parameters may be given by name.
    unknown = [name for name in names if name not in ours]
    return f"{signature} does not call them {unknown}" if unknown else ""


@pytest.mark.parametrize("version", TABLE)
def test_every_hook_can_be_called_as_that_release_calls_it(version: str) -> None:
    methods = TABLE[version]["methods"]
    wrong = {m: problems(m, wanted) for m, wanted in methods.items() if own(m)}
    assert {m: why for m, why in wrong.items() if why} == {}


@pytest.mark.parametrize("version", TABLE)
def test_nothing_is_left_abstract(version: str) -> None:
    abstract = {m for m, wanted in TABLE[version]["methods"].items() if wanted["abstract"]}
    assert {m for m in abstract if not own(m)} == set()
    assert len(abstract) >= 7


@pytest.mark.parametrize("version", TABLE)
def test_everything_that_is_imported_exists(version: str) -> None:
    assert TABLE[version]["missing"] == []


def test_the_table_says_of_the_installed_release_what_is_there() -> None:
    spec = importlib.util.spec_from_file_location("make", DATA / "make_signatures.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    root = Path(vllm.__file__).parents[1]
    version = ".".join(vllm.__version__.split(".")[:2])
    assert make.methods((root / make.BASE).read_text()) == TABLE[version]["methods"]
    for module, name in make.imports():
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), (module, name)


def test_the_table_covers_exactly_the_admitted_releases() -> None:
    admitted = [f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
    assert list(TABLE) == admitted
    for version in admitted:
        check_version(f"{version}.0")


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.0.0", "0.11.0rc2", "dev"])
def test_other_releases_are_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        check_version(version)
    assert str(raised.value) == (
        f"vLLM {version} is outside of the range that this TierKV supports, 0.30 to 0.33; "
        "install one of those, or a TierKV release for yours"
    )
