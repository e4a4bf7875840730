# SPDX-License-Identifier: Apache-2.0
"""Sends requests to an OpenAI API, so many at once, and counts what became of them.

**Threads and ownership.** `send_all` starts `concurrency` threads, named `tierkv-warm`, and has
ended them when it returns or raises. They share the HTTP client, which allows that; each result is
put together on the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from tierkv.config.redis import is_loopback
from tierkv.errors import ConfigError, TierKVError

Body = tuple[str, Mapping[str, Any]]
"""Path of the API, and what is sent there."""

MOST_REASON = 200


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send.

    Attributes:
        url: of the server, with or without /v1 at its end.
        api_key: "" if it wants none.
        timeout: seconds for one request.
    """

    url: str
    api_key: str = ""
    timeout: float = 600.0


@dataclass(frozen=True, slots=True)
class Report:
    """What became of the requests.

    Attributes:
        prompts: that were answered.
        prompt_tokens, cached_tokens: of those, as the server counts; cached ones were there.
        seconds: from the first request to the last answer.
        failures: index of the request, and why.
    """

    prompts: int
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    failures: tuple[tuple[int, str], ...]


class Sender:
    """An HTTP client for one server. A context manager.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {target.url}: no address; write http://HOST:PORT")
        self._url = target.url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(
            base_url=self._url,
            timeout=target.timeout,
            headers={"Authorization": f"Bearer {target.api_key}"} if target.api_key else {},
            # What stays on this machine needs no proxy.
            trust_env=not is_loopback(parts.hostname),
            limits=httpx.Limits(max_connections=None),
        )

    def first_model(self) -> str:
        """The first model that the server lists.

        Raises:
            TierKVError: it cannot be reached, or lists none.
        """
        try:
            answer = self._client.get("/v1/models")
            if answer.status_code != httpx.codes.OK:
                raise TierKVError(f"{self._url}: {_refusal(answer)}")
            return str(answer.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            raise TierKVError(
                f"{self._url} cannot be reached ({_reason(error)}); is the engine up, and --url "
                "right?"
            ) from None
        except (ValueError, LookupError, TypeError):
            raise TierKVError(
                f"{self._url}/v1/models is not a list of models; is this vLLM's address?"
            ) from None

    def send_all(
        self, bodies: Sequence[Body], concurrency: int, done: Callable[[int], None]
    ) -> Report:
        """Send all, in order, and wait for the answers.

        Args:
            done: called with 1 after each.
        """
        started = time.monotonic()
        failures: list[tuple[int, str]] = []
        prompt_tokens = cached_tokens = 0
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="tierkv-warm")
        try:
            waiting = {pool.submit(self._send, body): n for n, body in enumerate(bodies)}
            for future in as_completed(waiting):
                result = future.result()
                if isinstance(result, str):
                    failures.append((waiting[future], result))
                else:
                    prompt_tokens += result[0]
                    cached_tokens += result[1]
                done(1)
        finally:
            # Interrupted: what has not been sent is not sent any more.
            pool.shutdown(cancel_futures=True)
        return Report(
            len(bodies) - len(failures),
            prompt_tokens,
            cached_tokens,
            time.monotonic() - started,
            tuple(sorted(failures)),
        )

    def _send(self, body: Body) -> tuple[int, int] | str:
        """Prompt tokens and cached ones, or why it failed."""
        path, fields = body
        try:
            answer = self._client.post(path, json=dict(fields))
            if answer.status_code != httpx.codes.OK:
                return _refusal(answer)
            usage = answer.json()["usage"]
            details = usage.get("prompt_tokens_details") or {}
            return int(usage["prompt_tokens"]), int(details.get("cached_tokens") or 0)
        except httpx.HTTPError as error:
            return _reason(error)
        except (ValueError, LookupError, TypeError, AttributeError):
            return "the answer is none of an OpenAI API"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def _reason(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    return str(error).splitlines()[0][:MOST_REASON] if str(error) else type(error).__name__


def _refusal(answer: httpx.Response) -> str:
    """The server's own words, on one line; never the request."""
    try:
        value = answer.json()
        text = str((value.get("error") or value).get("message") or answer.reason_phrase)
    except (ValueError, AttributeError):
        text = answer.reason_phrase
    return f"HTTP {answer.status_code}: {' '.join(text.split())[:MOST_REASON]}"
