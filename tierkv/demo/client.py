# SPDX-License-Identifier: Apache-2.0
"""What a user of the server sees: streamed answers, the time to the first token, the counters."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tierkv.demo.server import Server

REQUEST_TIMEOUT_S = 600.0
SETTLE_S = 2.0
MODEL = "demo"
"""Name under which every server of the demo serves its model."""

TIER_OF_SOURCE = {"device": "gpu", "host": "dram", "disk": "disk"}
"""vLLM's word for where cached prompt tokens came from, to ours; others keep their name."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered request.

    Attributes:
        ttft_s: from sending the request to the first token, measured here.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that were not computed, as the server reports it.
        token_ids: the answer; empty if the server does not return token ids.
        text: the answer.
    """

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    text: str

    def same_as(self, other: Answer) -> bool:
        """Token for token; by text where the server does not tell the tokens."""
        if self.token_ids and other.token_ids:
            return self.token_ids == other.token_ids
        return self.text == other.text


@dataclass(frozen=True, slots=True)
class Counters:
    """Prompt tokens a server has seen since its start, and where the cached ones came from."""

    prompt_tokens: int = 0
    hit_tokens: Mapping[str, int] = field(default_factory=dict)

    def since(self, earlier: Counters) -> Counters:
        """What came in between; a tier that gave nothing is left out."""
        hits = {
            tier: gained
            for tier, tokens in self.hit_tokens.items()
            if (gained := tokens - earlier.hit_tokens.get(tier, 0))
        }
        return Counters(self.prompt_tokens - earlier.prompt_tokens, hits)


class Client:
    """Talks to one server, one request at a time. Blocking; used by one thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._prompt_tokens = 0
        self._cached_tokens = 0
        # Not through a proxy that the user may have configured for the outside world.
        self._http = httpx.Client(
            base_url=server.url, timeout=httpx.Timeout(REQUEST_TIMEOUT_S), trust_env=False
        )

    def ask(self, prompt: str | Sequence[int], answer_tokens: int) -> Answer:
        """Greedy continuation of `prompt` by exactly `answer_tokens` tokens.

        Args:
            prompt: text, or token ids.
            answer_tokens: how many.

        Raises:
            DemoError: the server refused, failed or died; shows the end of its log.
        """
        body = {
            "model": MODEL,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        return self.stream(body)

    def stream(self, body: dict[str, Any]) -> Answer:
        """The answer to a streaming completion request, `body` as in OpenAI's API with usage.

        Raises:
            DemoError: as `ask`.
        """
        try:
            started = time.perf_counter()
            with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise self._server.error(f"refused a request: {response.text[:200]}")
                answer = read_answer(response.iter_lines(), started)
        except httpx.HTTPError as error:
            self._server.check_alive()
            raise self._server.error(f"a request failed ({error})") from error
        if answer is None:
            raise self._server.error("ended an answer without a token or without its usage")
        self._prompt_tokens += answer.prompt_tokens
        self._cached_tokens += answer.cached_tokens
        return answer

    def count_tokens(self, text: str) -> int:
        """Length of `text` in tokens of the served model."""
        return len(self.tokens(text))

    def tokens(self, text: str) -> list[int]:
        """`text` in tokens of the served model."""
        answer = self._json("POST", "/tokenize", {"model": MODEL, "prompt": text})
        return [int(token) for token in answer["tokens"]]

    def counters(self) -> Counters:
        """The server's counters, once they hold every request that was answered here.

        A server may count a little after it has answered. One that has not done so after
        `SETTLE_S` seconds is taken at its word: the figures then do not add up, and say so.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            counters = parse_counters(self.metrics())
            counted = (
                counters.prompt_tokens >= self._prompt_tokens
                and sum(counters.hit_tokens.values()) >= self._cached_tokens
            )
            if counted or time.monotonic() > deadline:
                return counters
            time.sleep(0.02)

    def metrics(self) -> str:
        """The server's page of Prometheus metrics."""
        return self._get("/metrics")

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._http.close()

    def _get(self, path: str) -> str:
        try:
            return self._http.get(path).raise_for_status().text
        except httpx.HTTPError as error:
            self._server.check_alive()
            raise self._server.error(f"{path} failed ({error})") from error

    def _json(self, method: str, path: str, body: object) -> Any:
        try:
            return self._http.request(method, path, json=body).raise_for_status().json()
        except httpx.HTTPError as error:
            self._server.check_alive()
            raise self._server.error(f"{path} failed ({error})") from error


def read_answer(lines: Iterable[str], started: float) -> Answer | None:
    """The answer in a stream of server-sent events; None if it is incomplete.

    Args:
        lines: of the response, as they arrive.
        started: `time.perf_counter()` when the request was sent.
    """
    ttft_s: float | None = None
    usage: dict[str, Any] | None = None
    token_ids: list[int] = []
    text: list[str] = []
    for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        for choice in event.get("choices", ()):
            if ttft_s is None:
                ttft_s = time.perf_counter() - started
            token_ids += choice.get("token_ids") or ()
            text.append(choice["text"])
        usage = event.get("usage") or usage
    if ttft_s is None or usage is None:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        ttft_s=ttft_s,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
        token_ids=tuple(token_ids),
        text="".join(text),
    )


def parse_counters(metrics: str) -> Counters:
    """The counters in a page of Prometheus metrics."""
    prompt_tokens = 0
    by_source: dict[str, int] = {}
    by_tier: dict[str, int] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "vllm:prompt_tokens_total":
                prompt_tokens += int(sample.value)
            elif sample.name == "vllm:prompt_tokens_cached_by_source_total":
                source = sample.labels["source"]
                tier = TIER_OF_SOURCE.get(source, source)
                by_source[tier] = by_source.get(tier, 0) + int(sample.value)
            elif sample.name == "tierkv_query_tokens_total" and sample.labels["outcome"] == "hit":
                tier = sample.labels["tier"]
                by_tier[tier] = by_tier.get(tier, 0) + int(sample.value)
    if by_tier:
        # TierKV's own count knows every tier by its name, vLLM's only some; its own cache it knows.
        by_source = {"gpu": by_source.get("gpu", 0)}
    return Counters(prompt_tokens, {**by_source, **by_tier})
