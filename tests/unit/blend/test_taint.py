# SPDX-License-Identifier: Apache-2.0
"""Hashes of approximate blocks: nobody else can ask for them, and they can be put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tierkv_vllm.blend.taint import Taint
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256, sha256_cbor, xxhash
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tests.unit.blend.library import words

BLOCK = 16


def make_request(hasher: Callable[..., bytes] = sha256, tokens: int = 100) -> Request:
    init_none_hash(hasher)
    return Request(
        request_id="r",
        prompt_token_ids=words(1, tokens),
        sampling_params=SamplingParams(max_tokens=50),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, hasher),
    )


def test_hashes_change_from_the_first_approximate_block_on_and_no_earlier() -> None:
    request, other = make_request(), make_request()
    Taint.put(request, 2)
    assert request.block_hashes[:2] == other.block_hashes[:2]
    assert not set(request.block_hashes[2:]) & set(other.block_hashes)
    assert len(request.block_hashes) == len(other.block_hashes) == 6


def test_two_requests_never_share_tainted_hashes() -> None:
    one, two = make_request(), make_request()
    Taint.put(one, 0)
    Taint.put(two, 0)
    assert not set(one.block_hashes) & set(two.block_hashes)


@pytest.mark.parametrize("hasher", [sha256, sha256_cbor, xxhash], ids=lambda f: f.__name__)
def test_a_tainted_hash_looks_like_any_other(hasher: Callable[..., bytes]) -> None:
    request, other = make_request(hasher), make_request(hasher)
    Taint.put(request, 0)
    for tainted, plain in zip(request.block_hashes, other.block_hashes, strict=True):
        assert type(tainted) is type(plain)
        assert len(tainted) == len(plain)


def test_what_is_computed_later_is_private_too() -> None:
    request, other = make_request(), make_request()
    Taint.put(request, 3)
    request.append_output_token_ids([1, 2, 3] * 10)
    other.append_output_token_ids([1, 2, 3] * 10)
    assert len(request.block_hashes) == len(other.block_hashes) == 8
    assert not set(request.block_hashes[3:]) & set(other.block_hashes)


def test_lifting_puts_every_hash_back_in_the_same_list() -> None:
    request, other = make_request(), make_request()
    hashes = request.block_hashes
    taint = Taint.put(request, 2)
    taint.lift(request)
    # vLLM holds the list itself.
    assert request.block_hashes is hashes
    assert request.block_hashes == other.block_hashes
    request.append_output_token_ids([5] * 40)
    other.append_output_token_ids([5] * 40)
    assert request.block_hashes == other.block_hashes


def test_a_taint_on_a_taint_lifts_to_the_one_below() -> None:
    """A request that was preempted and is blended once more."""
    request = make_request()
    Taint.put(request, 2)
    first = list(request.block_hashes)
    second = Taint.put(request, 4)
    assert request.block_hashes[:4] == first[:4]
    second.lift(request)
    assert request.block_hashes == first
