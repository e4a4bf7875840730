# SPDX-License-Identifier: Apache-2.0
"""Where those who look get their numbers from: an engine's stats socket, or a `/metrics` page.

Both give the same `Sample`, so that a screen need not know which it is; it says so, and what the
page cannot tell (single requests) is None.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client.parser import text_string_to_metric_families

from tierkv.stats import client
from tierkv.stats.protocol import StatsError
from tierkv.telemetry.catalog import BY_NAME
from tierkv.telemetry.counters import HistogramValue, Series, Snapshot

URL_SECONDS = 5.0
_PAGE_LIMIT = 64 << 20
_FOREIGN = ("model_name", "engine")
"""vLLM's own labels, in front of ours."""


OR_A_PAGE = "\nor name a metrics page: --url http://HOST:8000/metrics"


@dataclass(frozen=True, slots=True)
class Sample:
    """What one engine told.

    Attributes:
        time: of the numbers, in seconds since 1970.
        idle: the engine has nothing to do; None if that is not known.
        metrics: all counters.
        requests: the last ones, oldest first, as `RequestRecord.as_dict`; None if not known.
    """

    time: float
    idle: bool | None
    metrics: Snapshot
    requests: list[dict[str, Any]] | None


class Source(Protocol):
    """One engine.

    Attributes:
        info: what is known about it: as `info` in `tierkv.stats.protocol`, perhaps less.
        origin: where the numbers come from, for people.
    """

    info: dict[str, Any]
    origin: str

    def read(self, requests: int) -> Sample:
        """The numbers as they are now, with at most so many requests. Blocks.

        Raises:
            StatsError: the engine is gone.
        """
        ...

    def close(self) -> None: ...


class SocketSource:
    """An engine of this user on this machine."""

    def __init__(self, engine: client.Engine) -> None:
        self._engine = engine
        self.info = engine.info
        self.origin = f"pid {engine.info['pid']}"

    def read(self, requests: int) -> Sample:
        told = self._engine.request("snapshot")
        last = self._engine.request("requests", last=requests) if requests else []
        return Sample(told["time"], told["idle"], told["metrics"], last)

    def close(self) -> None:
        self._engine.close()


class UrlSource:
    """One engine of a `/metrics` page."""

    def __init__(
        self, url: str, who: tuple[str, str], fetch: Callable[[str], str], now: Callable[[], float]
    ) -> None:
        self._url = url
        self._who = who
        self._fetch = fetch
        self._now = now
        self.info: dict[str, Any] = {"model": who[0]}
        self.origin = f"{url} engine {who[1]}"

    def read(self, requests: int) -> Sample:
        now = self._now()
        pages = parse_page(self._fetch(self._url))
        if self._who not in pages:
            raise StatsError(f"{self._url}: no metrics of TierKV any more; was it restarted?")
        return Sample(now, None, pages[self._who], None)

    def close(self) -> None:
        """Nothing is held."""


def open_sources(url: str | None = None, pid: int | None = None) -> list[Source]:
    """All engines of the page, or else all of this user, or the one of this process.

    Raises:
        StatsError: there is none; says how to start one.
    """
    if url is not None:
        return list(url_sources(url))
    if pid is not None:
        return [SocketSource(client.only_engine(pid, OR_A_PAGE))]
    found: list[Source] = [SocketSource(engine) for engine in client.engines()]
    if not found:
        raise StatsError(client.HOW_TO_START + OR_A_PAGE)
    return found


def open_source(url: str | None = None, pid: int | None = None) -> Source:
    """The one engine that is meant.

    Raises:
        StatsError: there is none, or there are several and none was named.
    """
    if url is None:
        return SocketSource(client.only_engine(pid, OR_A_PAGE))
    return url_sources(url)[0]


def url_sources(
    url: str,
    fetch: Callable[[str], str] | None = None,
    now: Callable[[], float] = time.time,
) -> list[UrlSource]:
    """All engines of one page.

    Raises:
        StatsError: no page, or no TierKV on it.
    """
    fetch = fetch or fetch_page
    if "://" not in url:
        url = f"http://{url}"
    if not url.partition("://")[2].partition("/")[2]:
        url = url.rstrip("/") + "/metrics"
    pages = parse_page(fetch(url))
    if not pages:
        raise StatsError(
            f"{url}: no metrics of TierKV on this page; is the connector in its "
            "--kv-transfer-config?"
        )
    return [UrlSource(url, who, fetch, now) for who in pages]


def fetch_page(url: str) -> str:
    """The page's text.

    Raises:
        StatsError: there is none.
    """
    if not url.startswith(("http://", "https://")):
        raise StatsError(f"{url}: give an http:// or https:// address")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=URL_SECONDS) as response:
            text: str = response.read(_PAGE_LIMIT).decode("utf-8", "replace")
    except (OSError, ValueError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", None) or error
        raise StatsError(f"{url}: no metrics page ({reason}); is the server running?") from None
    return text


def parse_page(text: str) -> dict[tuple[str, str], Snapshot]:
    """A page's metrics of TierKV, by vLLM's model name and engine."""
    found: dict[tuple[str, str], Snapshot] = {}
    histograms: dict[tuple[str, str, str, tuple[str, ...]], list[tuple[float, float]]] = {}
    sums: dict[tuple[str, str, str, tuple[str, ...]], float] = {}
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise StatsError(f"not a metrics page ({error}); give the address of /metrics") from None
    for family in families:
        if not family.name.startswith("tierkv_"):
            continue
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in _FOREIGN}
            bound = labels.pop("le", "") if family.type == "histogram" else ""
            labels = _ordered(family.name, labels)
            model, engine = (sample.labels.get(name, "") for name in _FOREIGN)
            snapshot = found.setdefault((model, engine), {})
            if family.type == "histogram":
                key = (model, engine, family.name, tuple(labels.values()))
                if sample.name.endswith("_bucket"):
                    if key not in histograms:
                        _append(snapshot, family.name, labels, 0.0)
                    histograms.setdefault(key, []).append((float(bound), sample.value))
                elif sample.name.endswith("_sum"):
                    sums[key] = sample.value
            elif not sample.name.endswith("_created"):
                _append(snapshot, sample.name, labels, sample.value)
    for (model, engine, name, values), buckets in histograms.items():
        for one in found[model, engine][name]:
            if tuple(one["labels"].values()) == values:
                one["value"] = _histogram(buckets, sums.get((model, engine, name, values), 0.0))
    return found


def _ordered(family: str, labels: dict[str, str]) -> dict[str, str]:
    """In the catalogue's order, as a socket gives them."""
    metric = BY_NAME.get(family) or BY_NAME.get(f"{family}_total")
    if metric is None:
        return labels
    return {label.name: labels.get(label.name, "") for label in metric.labels}


def _append(snapshot: Snapshot, name: str, labels: dict[str, str], value: float) -> None:
    series: Series = {"labels": labels, "value": value}
    snapshot.setdefault(name, []).append(series)


def _histogram(buckets: list[tuple[float, float]], total: float) -> HistogramValue:
    counts = [int(count) for _, count in sorted(buckets)]
    single = [count - before for count, before in zip(counts, [0, *counts], strict=False)]
    return {"count": counts[-1], "sum": total, "buckets": single}
