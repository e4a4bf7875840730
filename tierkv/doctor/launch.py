# SPDX-License-Identifier: Apache-2.0
"""The flags and variables that vLLM would be started with, as far as they decide about TierKV."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tierkv.config import LoadedConfig
from tierkv.doctor.finding import Finding, error, warning

CONNECTOR = "TierKVConnector"
FLAG = "--kv-transfer-config"
EXAMPLE = f'{FLAG} \'{{"kv_connector": "{CONNECTOR}", "kv_role": "kv_both"}}\''


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line of vLLM, as far as it is understood.

    Attributes:
        given: whether there is one at all.
        by_module: whether Python runs a module, so that no command `vllm` is started.
        transfer: the value of `--kv-transfer-config`; None if it is missing or no JSON object.
        inline: TierKV's own configuration in it.
        flags: other flags with their values, without the dashes.
        findings: what is wrong with `--kv-transfer-config`.
    """

    given: bool = False
    transfer: Mapping[str, Any] | None = None
    inline: Mapping[str, Any] | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    by_module: bool = False

    def number(self, *names: str) -> int:
        """The value of a flag that counts something; 1 if it is not given."""
        for name in names:
            if self.flags.get(name, "").isdigit():
                return int(self.flags[name])
        return 1

    @property
    def workers(self) -> int:
        tensor = self.number("tensor-parallel-size", "tp")
        return tensor * self.number("pipeline-parallel-size", "pp")


def understand(words: Sequence[str]) -> Launch:
    """Read a command line like `vllm serve MODEL --kv-transfer-config …`."""
    if not words:
        return Launch()
    flags = _flags(words)
    file_findings = []
    if flags.get("config"):
        try:
            # The command line beats the file.
            flags = _flags_of_file(Path(flags["config"])) | flags
        except (OSError, ValueError, yaml.YAMLError) as problem:
            reason = str(problem).splitlines()[0]
            what = f"cannot be read ({reason}): vLLM does not start"
            file_findings.append(error("vllm-config", flags["config"], what, "mend the file"))
    transfer, findings = _transfer(flags)
    findings = [*file_findings, *findings]
    inline = None
    if transfer is not None:
        mine = _ours(transfer)
        findings += _judge(transfer, mine)
        extra = None if mine is None else mine.get("kv_connector_extra_config")
        inline = extra if isinstance(extra, dict) else None
    return Launch(True, transfer, inline, flags, tuple(findings), "-m" in words[1:3])


def variables(environ: Mapping[str, str], launch: Launch) -> Iterator[Finding]:
    """Variables that keep vLLM from starting, or from finding TierKV."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if re.search(r"expandable_segments\s*:\s*true", environ.get(name, ""), re.IGNORECASE):
            yield error(
                "expandable-segments",
                name,
                "expandable_segments is on: vLLM does not start with a KV connector then, since "
                "the memory of its KV cache could move",
                f"unset {name}, or take expandable_segments out of it",
            )
    plugins = environ.get("VLLM_PLUGINS")
    by_path = (launch.transfer or {}).get("kv_connector_module_path")
    if plugins is not None and "tierkv" not in map(str.strip, plugins.split(",")) and not by_path:
        yield error(
            "vllm-plugins",
            "VLLM_PLUGINS",
            f"lists {plugins or 'nothing'}, so vLLM does not load TierKV's plug-in and does not "
            f"know {CONNECTOR}",
            "add tierkv to it, or unset it",
        )


def against(launch: Launch, loaded: LoadedConfig) -> Iterator[Finding]:
    """Flags that do not go with the configuration."""
    chunk_tokens, block = loaded.config.chunk_tokens, launch.flags.get("block-size", "")
    if chunk_tokens and block.isdigit() and int(block) and chunk_tokens % int(block):
        yield error(
            "chunk-tokens",
            f"{loaded.sources['chunk_tokens']}: chunk_tokens",
            f"{chunk_tokens} is not a multiple of --block-size {block}: the engine stops at start",
            f"set it to a multiple of {block}, or leave it out",
        )
    engines = launch.number("data-parallel-size", "dp")
    disks = [tier for tier in loaded.config.lower if tier.type == "disk"]
    if engines > 1 and disks:
        yield warning(
            "data-parallel",
            f"--data-parallel-size {engines}",
            f"{engines} engines, and one directory for the tier {disks[0].name}: the first one "
            "takes it, the others serve without",
            "start each engine by itself with a path of its own, or share a redis tier",
        )


def _flags_of_file(file: Path) -> dict[str, str]:
    """The flags in a file for vLLM's own `--config`.

    Raises:
        OSError, ValueError, yaml.YAMLError: it is not there, or no mapping of flags.
    """
    value = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("no mapping of flags to values")
    return {
        str(name).replace("_", "-"): json.dumps(each) if isinstance(each, dict) else str(each)
        for name, each in value.items()
    }


def _flags(words: Sequence[str]) -> dict[str, str]:
    flags: dict[str, str] = {}
    for number, word in enumerate(words):
        if not word.startswith("-") or word == "-":
            continue
        name, equals, value = word.partition("=")
        if not equals:
            following = words[number + 1] if number + 1 < len(words) else ""
            value = "" if following.startswith("-") and not following[1:2].isdigit() else following
        flags[name.lstrip("-").replace("_", "-")] = value
    return flags


def _transfer(flags: Mapping[str, str]) -> tuple[dict[str, Any] | None, list[Finding]]:
    prefix = FLAG.lstrip("-")
    # vLLM also takes the parts of a JSON flag one by one: --kv-transfer-config.kv_role kv_both
    parts = {
        name[len(prefix) + 1 :].replace("-", "_"): value
        for name, value in flags.items()
        if name.startswith(prefix + ".")
    }
    if prefix not in flags and not parts:
        remedy = f"add {EXAMPLE}"
        return None, [error("not-attached", FLAG, "is missing: vLLM runs without TierKV", remedy)]
    try:
        value = json.loads(flags[prefix]) if prefix in flags else {}
    except ValueError as problem:
        return None, [error("transfer-config", FLAG, f"is no JSON ({problem})", f"write {EXAMPLE}")]
    if not isinstance(value, dict):
        return None, [error("transfer-config", FLAG, "is no JSON object", f"write {EXAMPLE}")]
    for name, text in parts.items():
        inner = value
        *path, last = name.split(".")
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = text
    return value, []


def _ours(transfer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part that makes our connector: all of it, or one of several connectors'."""
    if transfer.get("kv_connector") == CONNECTOR:
        return transfer
    extra = transfer.get("kv_connector_extra_config")
    several = extra.get("connectors", []) if isinstance(extra, dict) else []
    for each in several if isinstance(several, list) else []:
        if isinstance(each, dict) and each.get("kv_connector") == CONNECTOR:
            return each
    return None


def _judge(transfer: Mapping[str, Any], mine: Mapping[str, Any] | None) -> list[Finding]:
    if mine is None:
        name = transfer.get("kv_connector")
        what = f"names {name!r}, not {CONNECTOR}: vLLM runs without TierKV"
        return [error("not-attached", FLAG, what, f'set "kv_connector": "{CONNECTOR}"')]
    findings = []
    role = mine.get("kv_role", transfer.get("kv_role"))
    if role != "kv_both":
        what = (
            "kv_role is missing: vLLM does not start"
            if role is None
            else f"kv_role is {role!r}: TierKV both loads and saves"
        )
        findings.append(error("kv-role", FLAG, what, 'set "kv_role": "kv_both"'))
    policy = transfer.get("kv_load_failure_policy", "recompute")
    if policy != "recompute":
        findings.append(
            warning(
                "load-failure-policy",
                FLAG,
                f"kv_load_failure_policy is {policy!r}, which fails a request whose load failed; "
                "TierKV sets recompute itself, other connectors beside it do not",
                'set "kv_load_failure_policy": "recompute"',
            )
        )
    return findings
