# SPDX-License-Identifier: Apache-2.0
"""Small invented traces: conversations that grow, over a few system prompts."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from random import Random

BLOCK = 4


def conversations(seed: int, requests: int, systems: int = 3) -> list[dict[str, object]]:
    """Requests in the form of a trace: some go on with an earlier one, some begin anew."""
    random = Random(seed)
    fresh = count(100)
    heads = [[next(fresh) for _ in range(random.randint(1, 3))] for _ in range(systems)]
    open_ones: list[list[int]] = []
    made: list[dict[str, object]] = []
    for number in range(requests):
        if open_ones and random.random() < 0.6:
            ids = random.choice(open_ones[-12:])
        else:
            ids = list(random.choice(heads))
            open_ones.append(ids)
        ids += [next(fresh) for _ in range(random.randint(0, 3))]
        partial = random.randint(0, BLOCK - 1)  # tokens behind the last whole block
        asked = [*ids, next(fresh)] if partial else list(ids)
        made.append(
            {
                "timestamp": number * 100,
                "input_length": len(ids) * BLOCK + partial,
                "output_length": 1,
                "hash_ids": asked,
            }
        )
    return made


def write(path: Path, requests: list[dict[str, object]]) -> Path:
    """Into a file, one a line."""
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path
