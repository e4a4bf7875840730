# SPDX-License-Identifier: Apache-2.0
"""How a chunk's bytes are packed: the contract, and a registry that imports on demand."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from tierkv.codecs.base import Codec
from tierkv.errors import ConfigError, FormatError

__all__ = ["KNOWN_CODECS", "Codec", "codec_by_id", "make_codec"]

KNOWN_CODECS: dict[str, tuple[int, str]] = {
    "raw": (0, "tierkv.codecs.raw:RawCodec"),
    "lz4": (1, "tierkv.codecs.lz4_shuffle:Lz4ShuffleCodec"),
}
"""Name in the configuration to (number in the record, `module:Class`); others: the entry points
`tierkv.codecs`."""


def _targets() -> dict[str, str]:
    found = {point.name: point.value for point in entry_points(group="tierkv.codecs")}
    return found | {name: target for name, (_, target) in KNOWN_CODECS.items()}


def _load(target: str) -> Codec:
    module, _, attribute = target.partition(":")
    codec = getattr(import_module(module), attribute)()
    assert isinstance(codec, Codec), f"{target} is no Codec"
    return codec


@cache
def make_codec(name: str) -> Codec:
    """The codec of a configuration's `codec:` field.

    Raises:
        ConfigError: no such codec, or what it needs is not installed.
    """
    targets = _targets()
    if name not in targets:
        known = ", ".join(sorted(targets))
        raise ConfigError(f"codec: unknown codec {name!r}; choose one of {known}")
    try:
        return _load(targets[name])
    except ImportError as error:
        raise ConfigError(
            f"codec: {name!r} cannot be imported ({error}); install what it needs or set codec: raw"
        ) from error


@cache
def codec_by_id(codec_id: int) -> Codec:
    """The codec that a record's header names.

    Raises:
        FormatError: no codec of that number is installed here.
    """
    for known_id, target in KNOWN_CODECS.values():
        if known_id == codec_id:
            return _load(target)
    for name in _targets().keys() - KNOWN_CODECS.keys():
        try:
            codec = make_codec(name)
        except ConfigError:
            continue
        if codec.codec_id == codec_id:
            return codec
    raise FormatError(f"packed by codec {codec_id}, which is not installed here")
