# SPDX-License-Identifier: Apache-2.0
"""Which value counts, and that each one knows where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.config import InvalidConfig, load_config
from tierkv.config.blend import BlendConfig
from tierkv.config.memory import Memory
from tierkv.config.sources import did_you_mean
from tierkv.errors import ConfigError

FILE = """\
version: 1
tiers:
  - {type: dram, capacity: 1GiB}
  - type: disk
    path: /x
    capacity: 10GiB
    load_deadline: 5s
"""
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def file() -> Path:
    path = Path("t.yaml")
    path.write_text(FILE)
    return path


def refused(*args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        load_config(*args, **{"environ": {}, **kwargs})
    return list(caught.value.problems)


# Precedence


def test_each_value_is_taken_from_the_highest_source_that_has_it(file: Path) -> None:
    environ = {
        "TIERKV_TIERS__DISK__CAPACITY": "20GiB",
        "TIERKV_TIERS__DISK__LOAD_DEADLINE": "50ms",
        "TIERKV_SAVE": "prompt",
    }
    inline = {"save": "all", "tiers": {"disk": {"capacity": "30GiB"}}}
    loaded = load_config(file, inline, environ)
    disk = loaded.config.lower[0]
    assert (disk.capacity, disk.load_deadline, disk.probe_after) == (30 * GIB, 0.05, 5.0)
    assert (loaded.config.save, loaded.config.dram.capacity) == ("all", GIB)
    assert loaded.sources["tiers.disk.capacity"] == "inline"
    assert loaded.sources["tiers.disk.load_deadline"] == "TIERKV_TIERS__DISK__LOAD_DEADLINE"
    assert loaded.sources["tiers.disk.probe_after"] == "default"
    assert loaded.sources["tiers.disk.path"] == "t.yaml:5"
    assert loaded.sources["tiers.dram.capacity"] == "t.yaml:3"
    assert loaded.sources["save"] == "inline"
    assert (loaded.file, loaded.notes, loaded.warnings) == (file, [], [])


def test_every_value_in_effect_has_a_source(file: Path) -> None:
    loaded = load_config(file, environ={})
    fields = {
        f"tiers.{t.name}.{name}" for t in loaded.config.tiers for name in type(t).model_fields
    }
    assert set(loaded.sources) == fields | {
        *("version", "key_secret", "chunk_tokens", "save"),
        *("stats.socket", "stats.control"),
        *(f"blend.{name}" for name in BlendConfig.model_fields),
    }


@pytest.mark.parametrize(
    ("argument", "inline", "variable", "here", "expected"),
    [
        ("a", "b", "c", True, 1),
        (None, "b", "c", True, 2),
        (None, None, "c", True, 3),
        (None, None, None, True, 4),
    ],
)
def test_the_file_is_the_first_that_is_named(
    argument: str | None, inline: str | None, variable: str | None, here: bool, expected: int
) -> None:
    for tokens, name in enumerate(("a", "b", "c", "tierkv.yaml"), start=1):
        Path(name).write_text(f"chunk_tokens: {tokens}\n" + FILE)
    loaded = load_config(
        Path(argument) if argument else None,
        {"config": inline} if inline else {},
        {"TIERKV_CONFIG": variable} if variable else {},
    )
    assert loaded.config.chunk_tokens == expected


def test_without_any_file_a_quarter_of_the_free_memory_is_used_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tierkv.config.memory.measure", lambda: Memory(99 * GIB, 20 * GIB, False))
    loaded = load_config(environ={"TIERKV_CONFIG": ""})
    assert loaded.config.dram.capacity == 5 * GIB
    assert loaded.config.lower == ()
    assert loaded.sources["tiers.dram.capacity"] == "default"
    assert "DRAM only, 5GiB by default" in loaded.notes[0]
    assert "20GiB that are free" in loaded.notes[0]


def test_the_default_is_at_most_16_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.config.memory.measure", lambda: Memory(999 * GIB, 900 * GIB, False))
    assert load_config(environ={}).config.dram.capacity == 16 * GIB


def test_the_default_can_be_changed_by_a_variable() -> None:
    loaded = load_config(environ={"TIERKV_TIERS__DRAM__CAPACITY": "3GiB"})
    assert loaded.config.dram.capacity == 3 * GIB


def test_a_named_file_that_is_missing_is_an_error_and_says_who_named_it() -> None:
    advice = (
        "no such file; give the path of a configuration, or write one with 'tierkv config init'"
    )
    assert refused(Path("no.yaml")) == [f"no.yaml: {advice}"]
    assert refused(inline={"config": "no.yaml"}) == [
        f"no.yaml: {advice} (named by config in the inline mapping)"
    ]
    assert refused(environ={"TIERKV_CONFIG": "no.yaml"}) == [
        f"no.yaml: {advice} (named by TIERKV_CONFIG)"
    ]


# Environment


def test_a_tier_is_addressed_by_its_name_wherever_it_stands(file: Path) -> None:
    file.write_text(
        "tiers:\n  - {type: dram, capacity: 1GiB, name: ram}\n"
        "  - {type: disk, name: fast_ssd, path: /a, capacity: 1GiB}\n"
        "  - {type: disk, path: /b, capacity: 1GiB}\n"
    )
    environ = {
        "TIERKV_TIERS__DISK__CAPACITY": "2GiB",
        "TIERKV_TIERS__FAST_SSD__CAPACITY": "3GiB",
        "TIERKV_TIERS__RAM__CAPACITY": "4GiB",
    }
    capacities = [tier.capacity // GIB for tier in load_config(file, environ=environ).config.tiers]
    assert capacities == [4, 3, 2]


def test_a_bad_value_in_a_variable_names_the_variable(file: Path) -> None:
    environ = {"TIERKV_TIERS__DRAM__CAPACITY": "ten", "TIERKV_CHUNK_TOKENS": ""}
    assert refused(file, environ=environ) == [
        "TIERKV_CHUNK_TOKENS: chunk_tokens: is empty; give a value or remove it",
        (
            "TIERKV_TIERS__DRAM__CAPACITY: tiers.0.dram.capacity: 'ten' is not a size; "
            "write a number and its unit, like 32GiB"
        ),
    ]


UNKNOWN = {
    "TIERKV_FOO": "unknown key 'foo'; "
    "the keys here: version, key_secret, chunk_tokens, save, stats, blend, tiers",
    "TIERKV_TIERS": "name the tier and the key, like TIERKV_TIERS__DRAM__CAPACITY",
    "TIERKV_TIERS__DISK__CAPACTY": "unknown key 'capacty'; did you mean 'capacity'?",
    "TIERKV_TIERS__DISK__PATH__X": "'path' holds a single value; nothing can follow it",
    "TIERKV_TIERS__DISK__TYPE": "the type of a tier stands in its list; change it there",
    "TIERKV_TIERS__DSK__CAPACITY": "no tier is named 'dsk'; did you mean 'disk'?",
    "TIERKV_TIERS__NVME__CAPACITY": "no tier is named 'nvme'; the tiers: dram, disk",
}


def test_a_variable_that_sets_nothing_is_an_error_if_strict_and_else_a_warning(file: Path) -> None:
    environ = dict.fromkeys(UNKNOWN, "x")
    assert refused(file, environ=environ, strict=True) == [
        f"{name}: {why}" for name, why in UNKNOWN.items()
    ]
    loaded = load_config(file, environ=environ)
    assert loaded.warnings == [f"{name}: ignored: {why}" for name, why in UNKNOWN.items()]
    assert loaded.config == load_config(file, environ={}).config


def test_variables_that_mean_something_else_are_left_alone(file: Path) -> None:
    file.write_text("key_secret: {env: TIERKV_KEY}\n" + FILE.replace("/x", "${TIERKV_DIR}/x"))
    environ = {"TIERKV_KEY": "k", "TIERKV_DIR": "/d", "TIERKV_CACHE": "/c", "OTHER_FOO": "x"}
    loaded = load_config(file, environ=environ, strict=True)
    assert loaded.warnings == []
    assert loaded.config.lower[0].path == Path("/d/x")  # type: ignore[attr-defined]


def test_a_reference_to_a_secret_is_replaced_as_a_whole(file: Path) -> None:
    file.write_text("key_secret: {file: /a}\n" + FILE)
    loaded = load_config(file, environ={"TIERKV_KEY_SECRET__ENV": "KEY"})
    assert loaded.config.key_secret is not None
    assert (loaded.config.key_secret.file, loaded.config.key_secret.env) == (None, "KEY")
    assert loaded.sources["key_secret.env"] == "TIERKV_KEY_SECRET__ENV"
    both = {"TIERKV_KEY_SECRET__ENV": "KEY", "TIERKV_KEY_SECRET__FILE": "/b"}
    assert "needs exactly one of file and env" in refused(file, environ=both)[0]


def test_a_tier_that_is_wrong_in_itself_hides_no_variable(file: Path) -> None:
    file.write_text("tiers:\n  - {type: dran, capacity: 1GiB}\n")
    environ = {"TIERKV_TIERS__DRAN__CAPACITY": "2GiB"}
    problems = refused(file, environ=environ, strict=True)
    assert len(problems) == 1
    assert "'dran' is not a tier type" in problems[0]


# Inline


def test_a_whole_configuration_may_be_inline_and_then_no_other_file_is_read() -> None:
    Path("tierkv.yaml").write_text("chunk_tokens: 7\n" + FILE)
    tiers = [{"type": "dram", "capacity": "2GiB"}]
    loaded = load_config(inline={"tiers": tiers}, environ={"TIERKV_CONFIG": "tierkv.yaml"})
    assert loaded.config.chunk_tokens is None
    assert loaded.config.dram.capacity == 2 * GIB
    assert loaded.file is None
    assert loaded.notes == ["TIERKV_CONFIG is not read: the tiers are given inline"]


def test_an_inline_list_replaces_the_list_of_the_file_that_it_names(file: Path) -> None:
    file.write_text("chunk_tokens: 7\n" + FILE)
    inline = {"config": "t.yaml", "tiers": [{"type": "dram", "capacity": "2GiB"}]}
    prefix = "TIERKV_TIERS__DRAM__"
    environ = {prefix + "CAPACITY": "9GiB", prefix + "POLICY": "s3fifo"}
    loaded = load_config(inline=inline, environ=environ)
    assert loaded.config.chunk_tokens == 7
    assert [tier.capacity for tier in loaded.config.tiers] == [2 * GIB]
    assert loaded.config.dram.policy == "s3fifo"


def test_inline_units_are_as_strict_as_the_files() -> None:
    assert refused(inline={"tiers": [{"type": "dram", "capacity": 32}]}) == [
        "inline: tiers.0.dram.capacity: 32 has no unit; 32GiB or 32GB?"
    ]


@pytest.mark.parametrize(
    ("inline", "problem"),
    [
        ({"config": 5}, "inline: config: must be the path of a file"),
        ({"sav": "all"}, "inline: sav: unknown key; did you mean 'save'?"),
        ({"tiers": "dram"}, "inline: tiers: must be a list of tiers, or a mapping from tier names"),
        ({"tiers": {"disk": 5}}, "inline: tiers.disk: must be a mapping of the values to change"),
        (
            {"tiers": {"disk": {"capacty": "1GiB"}}},
            "inline: tiers.disk.capacty: unknown key 'capacty'; did you mean 'capacity'?",
        ),
        (
            {"tiers": {"9": {"capacity": "1GiB"}}},
            "inline: tiers.9.capacity: no tier is named '9'; the tiers: dram, disk",
        ),
        ({"save": object()}, "inline: save: must be plain text, a number, a list or a mapping"),
        (
            {"save": "${NOPE}"},
            "inline: save: variable NOPE is not set; set it, or write ${NOPE:-default}",
        ),
    ],
)
def test_an_inline_value_that_does_not_fit_is_named(
    inline: dict[str, Any], problem: str, file: Path
) -> None:
    assert refused(file, inline) == [problem]


def test_an_endlessly_nested_inline_value_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert refused(inline={"save": loop, "tiers": [{"type": "dram", "capacity": "1GiB"}]}) == [
        "inline: save: is nested too deeply; a configuration has four levels"
    ]


def test_the_callers_mapping_is_not_changed(file: Path) -> None:
    inline = {"config": "t.yaml", "tiers": {"disk": {"capacity": "1GiB"}}}
    load_config(inline=inline, environ={})
    assert inline == {"config": "t.yaml", "tiers": {"disk": {"capacity": "1GiB"}}}


# Interpolation


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("${DIR}/kv", "/data/kv"),
        ("/a/${UNSET:-b}/${EMPTY:-c}", "/a/b/c"),
        ("/a${EMPTY}b", "/ab"),
        ("/a/$$b", "/a/$b"),
        ("${UNSET:-/d}", "/d"),
        ("${DIR}$${DIR}", "/data${DIR}"),
        ("${NESTED}", "/n/${DIR}"),
    ],
)
def test_variables_are_put_into_strings(written: str, path: str, file: Path) -> None:
    file.write_text(FILE.replace("path: /x", f"path: '{written}'"))
    environ = {"DIR": "/data", "EMPTY": "", "NESTED": "/n/${DIR}"}
    assert load_config(file, environ=environ).config.lower[0].path == Path(path)  # type: ignore[attr-defined]


@pytest.mark.parametrize("written", ["$DIR", "${DIR", "${}", "${1}", "a$", "${DIR:+x}", "${a b}"])
def test_a_dollar_that_means_nothing_is_refused(written: str, file: Path) -> None:
    file.write_text(FILE.replace("path: /x", f"path: '{written}'"))
    assert refused(file, environ={"DIR": "/d"}) == [
        (
            "t.yaml:5:11: tiers.1.disk.path: holds a single $; "
            "write ${NAME} for a variable, $$ for a dollar"
        )
    ]


def test_a_variables_value_cannot_become_structure(file: Path) -> None:
    file.write_text(FILE.replace("1GiB", "'${EVIL}'"))
    problems = refused(file, environ={"EVIL": "1GiB}\n  - {type: disk, path: /etc"})
    assert len(problems) == 1
    assert problems[0].startswith("t.yaml:3:28: tiers.0.dram.capacity: '1GiB}\\n  - {type: disk,")
    assert problems[0].endswith("(the value comes from ${EVIL})")


def test_an_interpolated_value_names_its_variable_as_a_source(file: Path) -> None:
    file.write_text(FILE.replace("1GiB", "'${SIZE}'").replace("path: /x", "path: '${A}${B:-/b}'"))
    loaded = load_config(file, environ={"SIZE": "2GiB", "A": "/a"})
    assert loaded.config.dram.capacity == 2 * GIB
    assert loaded.sources["tiers.dram.capacity"] == "t.yaml:3 (${SIZE})"
    assert loaded.sources["tiers.disk.path"] == "t.yaml:5 (${A}, ${B})"


def test_variables_are_not_put_into_variables(file: Path) -> None:
    environ = {"TIERKV_TIERS__DISK__PATH": "/a/${HOME}$"}
    disk = load_config(file, environ=environ).config.lower[0]
    assert disk.path == Path("/a/${HOME}$")  # type: ignore[attr-defined]


def test_the_process_environment_is_used_if_none_is_given(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_TIERS__DRAM__CAPACITY", "7GiB")
    assert load_config(file).config.dram.capacity == 7 * GIB


def test_a_word_of_another_kind_is_not_taken_for_a_typo() -> None:
    assert did_you_mean("redis", ["dram", "disk"]) == ""
    assert did_you_mean("dsik", ["dram", "disk"]) == "; did you mean 'disk'?"
    assert did_you_mean("capacity" + "x" * 1_000_000, ["capacity"]) == ""


def test_a_config_error_is_what_callers_catch() -> None:
    assert issubclass(InvalidConfig, ConfigError)


KEYS = ["version", "key_secret", "tiers", "config", "type", "name", "capacity", "path", "env"]
WORDS = ["dram", "disk", "1GiB", "5", "/x", "${A}", "$", "no.yaml", "", "\0", "²", "9" * 5000]
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text()
NAMES = st.sampled_from([*KEYS, "dram", "0", "²"]) | st.text(max_size=5)
JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4)
)
PARTS = st.sampled_from(["TIERS", "DRAM", "CAPACITY", "KEY_SECRET", "ENV", "PATH", "NAME", "", "X"])
VARIABLES = st.lists(PARTS, max_size=4).map(lambda parts: "TIERKV_" + "__".join(parts))


@given(
    st.dictionaries(NAMES, JSON, max_size=4),
    st.dictionaries(VARIABLES, st.sampled_from(WORDS), max_size=3),
    st.booleans(),
)
def test_nothing_inline_or_in_the_environment_breaks_the_loader(
    inline: dict[str, Any], environ: dict[str, str], strict: bool
) -> None:
    try:
        load_config(inline=inline, environ=environ, strict=strict)
    except InvalidConfig as error:
        lines = error.problems
        assert lines
        assert not any("\n" in line for line in lines)
