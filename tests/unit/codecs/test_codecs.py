# SPDX-License-Identifier: Apache-2.0
"""Codecs: what goes in comes out, packing that does not pay is refused, junk stays junk."""

from __future__ import annotations

import struct
from importlib.metadata import EntryPoint

import lz4.block
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierkv.codecs
from tierkv.codecs import KNOWN_CODECS, codec_by_id, make_codec
from tierkv.codecs.lz4_shuffle import Lz4ShuffleCodec
from tierkv.codecs.raw import RawCodec
from tierkv.errors import ConfigError, FormatError


def bfloat16_noise(count: int, seed: int) -> bytearray:
    """What KV looks like: the upper half of normally distributed float32."""
    values = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    return bytearray((values.view(np.uint32) >> 16).astype("<u2").tobytes())


def stored_of(pieces: list[memoryview] | None) -> memoryview:
    assert pieces is not None
    return memoryview(b"".join(pieces))


@pytest.mark.parametrize("name", sorted(KNOWN_CODECS))
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_goes_in_comes_out(name: str, ranks: int) -> None:
    codec = make_codec(name)
    parts = [memoryview(bfloat16_noise(8192, seed)) for seed in range(ranks)]
    before = [bytes(part) for part in parts]
    stored = stored_of(codec.encode(parts))
    back = [memoryview(bytearray(16384)) for _ in parts]
    codec.decode(stored, back)
    assert [bytes(part) for part in back] == before
    assert [bytes(part) for part in parts] == before


def test_lz4_stores_low_bytes_then_high_bytes_of_each_rank() -> None:
    parts = [memoryview(bytes(range(256)) * 16), memoryview(b"\x01\x02" * 2048)]
    stored = stored_of(Lz4ShuffleCodec().encode(parts))
    first, second = struct.unpack_from("<2I", stored)
    assert len(stored) == 8 + first + second
    plain = lz4.block.decompress(stored[8 : 8 + first], uncompressed_size=4096)
    assert plain == bytes(range(0, 256, 2)) * 16 + bytes(range(1, 256, 2)) * 16
    plain = lz4.block.decompress(stored[8 + first :], uncompressed_size=4096)
    assert plain == b"\x01" * 2048 + b"\x02" * 2048


def test_bfloat16_noise_shrinks_only_with_its_bytes_apart() -> None:
    part = bfloat16_noise(1 << 16, 0)
    stored = stored_of(Lz4ShuffleCodec().encode([memoryview(part)]))
    assert len(stored) < 0.9 * len(part)
    assert len(lz4.block.compress(part, store_size=False)) > 0.99 * len(part)


def test_lz4_refuses_what_does_not_shrink() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8).tobytes()
    assert Lz4ShuffleCodec().encode([memoryview(noise)]) is None


@given(st.binary(max_size=200))
def test_lz4_takes_any_junk_for_what_it_is(junk: bytes) -> None:
    back = [memoryview(bytearray(64)), memoryview(bytearray(64))]
    with pytest.raises(FormatError):
        Lz4ShuffleCodec().decode(memoryview(junk), back)


def test_lz4_leaves_no_byte_unexplained() -> None:
    parts = [memoryview(bytes(4096)), memoryview(bytes(4096))]
    stored = bytes(stored_of(Lz4ShuffleCodec().encode(parts)))
    back = [memoryview(bytearray(4096)), memoryview(bytearray(4096))]
    Lz4ShuffleCodec().decode(memoryview(stored), back)
    for other in (stored + b"x", stored[:-1], stored[:8]):
        with pytest.raises(FormatError):
            Lz4ShuffleCodec().decode(memoryview(other), back)


@pytest.mark.parametrize("claimed", [0, 63, 65, 1 << 31])
def test_an_lz4_block_of_another_length_is_refused(claimed: int) -> None:
    block = lz4.block.compress(bytes(min(claimed, 1 << 12)), store_size=False)
    stored = struct.pack("<I", len(block)) + block
    with pytest.raises(FormatError):
        Lz4ShuffleCodec().decode(memoryview(stored), [memoryview(bytearray(64))])


def test_a_raw_payload_that_does_not_fill_the_slot_is_refused() -> None:
    with pytest.raises(FormatError):
        RawCodec().decode(memoryview(bytes(63)), [memoryview(bytearray(64))])


def test_names_and_numbers_of_the_registry_are_those_of_the_codecs() -> None:
    for name, (codec_id, _) in KNOWN_CODECS.items():
        assert (make_codec(name).name, make_codec(name).codec_id) == (name, codec_id)
        assert codec_by_id(codec_id) == make_codec(name) or (
            type(codec_by_id(codec_id)) is type(make_codec(name))
        )


def test_an_unknown_codec_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'zstd'.*lz4, raw"):
        make_codec("zstd")
    with pytest.raises(FormatError, match="codec 77"):
        codec_by_id(77)


class ReversedCodec(RawCodec):
    """Stands for somebody else's codec."""

    name = "reversed"
    codec_id = 1000


@pytest.fixture
def foreign_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("reversed", f"{__name__}:ReversedCodec", "tierkv.codecs"),
        EntryPoint("absent", "no_such_module:Codec", "tierkv.codecs"),
    ]
    monkeypatch.setattr(tierkv.codecs, "entry_points", lambda group: points)
    make_codec.cache_clear()
    codec_by_id.cache_clear()


@pytest.mark.usefixtures("foreign_codecs")
def test_a_codec_of_another_package_is_found_by_name_and_number() -> None:
    assert make_codec("reversed").codec_id == 1000
    assert codec_by_id(1000).name == "reversed"


@pytest.mark.usefixtures("foreign_codecs")
def test_a_codec_that_cannot_be_imported_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        make_codec("absent")
