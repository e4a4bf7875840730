# SPDX-License-Identifier: Apache-2.0
"""The configuration in effect: found, laid over, validated, and able to say where it is from.

Precedence, value by value: the inline mapping (an engine's own configuration) over the environment
over the file over the defaults. All problems are found before any is raised.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from tierkv.config import machine, memory
from tierkv.config.interpolation import interpolate
from tierkv.config.loader import Refused, parse, read_text
from tierkv.config.messages import problems_of
from tierkv.config.models import TierKVConfig, arrangement_problems
from tierkv.config.registry import TIER_MODELS
from tierkv.config.sources import (
    FILE_VARIABLE,
    inline_tree,
    overlay_environment,
    overlay_inline,
    tier_name,
)
from tierkv.config.tree import DEFAULT, INLINE, Keys, Node, Place, Problem, find, grow, plain
from tierkv.config.units import WRITTEN, approximate_size, format_size
from tierkv.config.values import effective_values
from tierkv.errors import ConfigError

DEFAULT_FILE = "tierkv.yaml"
DEFAULT_DRAM_SHARE = 4
"""Without a file, DRAM gets one part in so many of the free memory; the model's host needs most."""
DEFAULT_DRAM_LIMIT = 16 << 30
"""Bytes. Without a file, nobody asked for more."""
MAX_PROBLEMS = 50
"""Lines of complaint that are shown; beyond that, it is the wrong file."""


class InvalidConfig(ConfigError):
    """A ConfigError that knows its problems by their parts, for `--json`."""

    def __init__(self, details: list[Problem], file: Path | None = None) -> None:
        shown = [str(problem) for problem in details[:MAX_PROBLEMS]]
        if len(details) > MAX_PROBLEMS:
            shown.append(f"… and {len(details) - MAX_PROBLEMS} more problems; mend these first")
        super().__init__(*shown)
        self.details = tuple(details)
        self.file = file


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and its story. Treat the containers as read-only.

    Attributes:
        config: the values.
        sources: dotted path (tiers by name: `tiers.disk.capacity`) to where the value came from:
            `file:line`, a variable, `inline` or `default`.
        notes: what was decided without being asked, one sentence each.
        warnings: what is probably a mistake but does not keep an engine from starting.
        file: the file that was read, if any.
    """

    config: TierKVConfig
    sources: dict[str, str]
    notes: list[str]
    warnings: list[str]
    file: Path | None = None


def load_config(
    path: Path | None = None,
    inline: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    check_machine: bool = False,
    *,
    strict: bool = False,
) -> LoadedConfig:
    """Find, read, merge and validate the configuration.

    Args:
        path: the file (`--config`); else `inline["config"]`, else `TIERKV_CONFIG`, else
            ./tierkv.yaml, else DRAM only. A whole configuration inline (a list of tiers) needs no
            file, and only one that it names itself is read.
        inline: values that beat all others. `tiers` is the whole list, or a mapping from the names
            of the file's tiers to the values to change.
        environ: variables; `os.environ` if None.
        check_machine: also check room, modes and owners on this machine.
        strict: an unknown `TIERKV_` variable is a problem, not a warning.

    Raises:
        ConfigError: with every problem, one line each: `place: path: what is wrong; what to do`.

    Blocks on file I/O. Any thread.
    """
    environ = os.environ if environ is None else environ
    return _Loading(dict(environ), dict(inline or {}), strict).run(path, check_machine)


def default_dram_capacity() -> tuple[int, int]:
    """Bytes for DRAM if nobody said how many, and the bytes that are free now.

    Whole MiB. Where the free memory cannot be told, nothing is free and 1GiB is the answer.
    """
    try:
        available = memory.measure().available
    except OSError:
        return 1 << 30, 0
    share = min(available // DEFAULT_DRAM_SHARE, DEFAULT_DRAM_LIMIT)
    return max(1, share >> 20) << 20, available


class _Loading:
    """One run of `load_config`: what was found so far."""

    def __init__(self, environ: dict[str, str], inline: dict[str, Any], strict: bool) -> None:
        self._environ = environ
        self._inline = inline
        self._strict = strict
        self._problems: list[Problem] = []
        self._notes: list[str] = []
        self._warnings: list[str] = []
        self._file: Path | None = None

    def run(self, path: Path | None, check_machine: bool) -> LoadedConfig:
        root = self._tree(path)
        self._check_arrangement(root)
        config: TierKVConfig | None = None
        try:
            config = TierKVConfig.model_validate(plain(root), context=WRITTEN)
        except ValidationError as error:
            self._problems += problems_of(error, root)
        if config is not None and check_machine and not self._problems:
            self._check_machine(config, root)
        if self._problems or config is None:
            self._fail(root)
        sources = {}
        for item in effective_values(config):
            node = find(root, item.keys)
            sources[item.path] = node.source if node is not None else DEFAULT.source
        return LoadedConfig(config, sources, self._notes, self._warnings, self._file)

    def _fail(self, root: Node | None = None) -> NoReturn:
        """Raise what was found, in the order of the file."""
        problems = sorted(self._problems, key=_order)
        if root is not None:
            problems = [_with_type(problem, root) for problem in problems]
        raise InvalidConfig(problems, self._file)

    def _check_machine(self, config: TierKVConfig, root: Node) -> None:
        def place(keys: Keys) -> Place:
            node = find(root, keys) or find(root, keys[:-1]) or root
            return node.place

        for finding in machine.check_machine(config, self._environ):
            where = place(finding.keys)
            if finding.fatal:
                self._report(where, finding.path, finding.message)
            else:
                self._warnings.append(str(Problem(where, finding.path, finding.message)))

    def _report(self, place: Place, path: str, message: str) -> None:
        self._problems.append(Problem(place, path, message))

    def _tree(self, path: Path | None) -> Node:
        """All sources laid over each other."""
        inline = inline_tree(self._inline, self._report)
        mentioned = interpolate(inline, self._environ, self._report)
        named = inline.value.pop("config", None)
        if named is not None and not isinstance(named.value, str):
            self._report(INLINE, "config", "must be the path of a file")
            named = None
        tiers = inline.child("tiers")
        whole = tiers is not None and isinstance(tiers.value, list)
        file, origin = self._find(path, named.value if named else None, whole)
        if file is not None:
            root = self._read(file, origin)
            mentioned |= interpolate(root, self._environ, self._report)
        else:
            root = Node({}, DEFAULT, DEFAULT) if whole else self._default()
        # The environment comes last, but never covers an inline value: the tree knows the ranks.
        overlay_inline(root, inline, self._report)
        overlay_environment(root, self._environ, mentioned | _secrets(root), self._unknown_variable)
        return root

    def _find(
        self, path: Path | None, named: str | None, whole_inline: bool
    ) -> tuple[Path | None, str]:
        """The file to read, and what names it if that is not the caller."""
        variable = self._environ.get(FILE_VARIABLE, "")
        if path is not None:
            return path, ""
        if named is not None:
            return Path(named), "config in the inline mapping"
        if whole_inline:
            if variable:
                self._notes.append(f"{FILE_VARIABLE} is not read: the tiers are given inline")
            return None, ""
        if variable:
            return Path(variable), FILE_VARIABLE
        return (Path(DEFAULT_FILE), "") if os.path.lexists(DEFAULT_FILE) else (None, "")

    def _read(self, file: Path, origin: str) -> Node:
        try:
            self._file = file
            return parse(read_text(file), str(file), self._report)
        except Refused as refused:
            problem = refused.problem
            if origin and not problem.place.line:
                problem = Problem(
                    problem.place, problem.path, f"{problem.message} (named by {origin})"
                )
            self._problems.append(problem)
            self._fail()

    def _default(self) -> Node:
        """DRAM only, of a size that does not hurt."""
        capacity, available = default_dram_capacity()
        self._notes.append(
            f"no configuration file ({FILE_VARIABLE} is not set and there is no {DEFAULT_FILE}): "
            f"DRAM only, {format_size(capacity)} by default, which is a quarter of the "
            f"{approximate_size(available)} that are free, at most "
            f"{format_size(DEFAULT_DRAM_LIMIT)}; 'tierkv config init' writes a file"
        )
        return grow({"tiers": [{"type": "dram", "capacity": format_size(capacity)}]}, DEFAULT)

    def _unknown_variable(self, variable: str, why: str) -> None:
        if self._strict:
            self._report(Place("variable", variable), "", why)
        else:
            self._warnings.append(f"{variable}: ignored: {why}")

    def _check_arrangement(self, root: Node) -> None:
        """What is wrong with the tiers together, told here because here the places are known."""
        tiers = root.child("tiers")
        if tiers is None or tiers.broken or not isinstance(tiers.value, list):
            return
        entries = tiers.value
        kinds = [_text(entry, "type") for entry in entries]
        names = [tier_name(entry) for entry in entries]
        paths = [_text(entry, "path") for entry in entries]
        for found in arrangement_problems(list(zip(kinds, names, paths, strict=True))):
            if not found.field and not TIER_MODELS.keys() >= set(kinds):
                continue  # a mistyped `dram` is one mistake, not two
            keys: list[str | int] = ["tiers"]
            if entries:
                keys.append(found.index)
            node = find(root, [*keys, found.field]) or find(root, keys) or tiers
            names_of_keys = [*map(str, keys), *kinds[found.index : found.index + 1], found.field]
            self._report(node.place, ".".join(filter(None, names_of_keys)), found.reason)


def _text(entry: Node, key: str) -> str:
    node = entry.child(key)
    return node.value if node is not None and isinstance(node.value, str) else ""


def _secrets(node: Node) -> set[str]:
    """Variables that secrets are read from: they may begin with TIERKV_ too."""
    if isinstance(node.value, list):
        return set().union(*map(_secrets, node.value))
    if not isinstance(node.value, dict):
        return set()
    return {_text(node, "env")}.union(*map(_secrets, node.value.values()))


def _with_type(problem: Problem, root: Node) -> Problem:
    """The problem with the tier's type in its path, where a check before validation left it out."""
    head, *rest = problem.path.split(".")
    if head != "tiers" or not rest or not re.fullmatch("[0-9]{1,6}", rest[0]):
        return problem
    entry = find(root, ("tiers", int(rest[0])))
    kind = _text(entry, "type") if entry is not None else ""
    if kind not in TIER_MODELS or rest[1:2] == [kind]:
        return problem
    return replace(problem, path=".".join((head, rest[0], kind, *rest[1:])))


def _order(problem: Problem) -> tuple[str, int, int]:
    return problem.place.name, problem.place.line, problem.place.column
