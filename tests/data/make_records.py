# SPDX-License-Identifier: Apache-2.0
"""Wrote the golden records beside it, with `struct` and `xxhash` alone.

Golden files are not written again when the code changes: a change that breaks them has changed
the format, and needs a new version number and a new file.
"""

from __future__ import annotations

import struct
from pathlib import Path

import xxhash


def record(version: int) -> bytes:
    """A record of two ranks, four tokens in blocks of two, 5120 bytes of KV a rank."""
    payload = b"".join(bytes([fill]) * 5120 + bytes(3072) for fill in (7, 9))
    head = struct.pack("<8sHHI", b"TIERKV\r\n", version, 0, 4096)
    head += struct.pack("<4I3Q", 2, 4, 2, 0, 5120, len(payload), len(payload))
    head += struct.pack("<3Q", 3, 1_700_000_000_000_000_000, xxhash.xxh3_64_intdigest(payload))
    head += bytes(range(16)) + b"k" * 16 + b"p" * 16 + b"c" * 16
    head += struct.pack("<4i", 1, 2, 70000, -1)
    head = head.ljust(4088, b"\0")
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + payload


if __name__ == "__main__":
    here = Path(__file__).parent
    (here / "record_v1.bin").write_bytes(record(1))
    (here / "record_v2_future.bin").write_bytes(record(2))
