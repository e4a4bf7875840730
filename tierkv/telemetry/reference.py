# SPDX-License-Identifier: Apache-2.0
"""The reference page of all metrics, written from the catalogue.

python -m tierkv.telemetry.reference > docs/reference/metrics.md
"""

from __future__ import annotations

import sys

from tierkv.telemetry.catalog import CATALOG, Label

_HEAD = """\
<!-- Generated: python -m tierkv.telemetry.reference > docs/reference/metrics.md -->
# Metrics

On vLLM's own `/metrics` page, with vLLM's labels `model_name` and `engine` before the ones below.
Every series exists from the start, at zero. Labels never hold a request id, a key or user data.

## Hit rate

> **hit rate = hit tokens / query tokens**, over the same requests.

*Query tokens* are the prompt tokens of a request that vLLM's own prefix cache did not hold, counted
once, at first admission. *Hit tokens* are those of them that TierKV delivered, so that vLLM did not
compute them. Per tier it is the same denominator, so the tiers add up; a tier is the one that held
the bytes when they were asked for.

```
sum(rate(tierkv_query_tokens_total{outcome="hit"}[5m])) / sum(rate(tierkv_query_tokens_total[5m]))
```

Each query token lands in exactly one outcome:

| outcome | meaning |
|---|---|
| `hit` | delivered |
| `miss` | not stored |
| `late` | a tier did not deliver before its `load_deadline` |
| `unavailable` | a tier is down, its breaker is open |
| `skipped` | loading would have taken longer than recomputing |
| `failed` | promised, not delivered, recomputed |
| `recomputed` | delivered, but computed by TierKV: repairs and gaps of any-text reuse |
| `tail` | after the last whole chunk; the last token is always computed |
| `declined` | TierKV does not serve the request, see `tierkv_declined_requests_total` |

Without faults the sum over outcomes equals `vllm:external_prefix_cache_queries`, and `hit` equals
`vllm:external_prefix_cache_hits`; a test checks both.

*Prefill avoided* is something else: hit tokens and the engine's own GPU hits together, over all
prompt tokens. *Avoidable* are `late`, `unavailable`, `skipped` and `failed` over query tokens: what
faster or healthier tiers would have made hits. Where there are no query tokens there is no rate:
TierKV shows `–`, never 0.

Each token under `miss` has one reason in `tierkv_miss_tokens_total`:

| reason | meaning |
|---|---|
| `never_seen` | not stored since this engine started, or too long ago to be remembered |
| `evicted` | a tier held it and gave it up; `tier` is the lowest that had it |
| `expired` | a tier with a `ttl` held it, longer ago than that |
| `invalid` | its bytes were wrong, or it was purged |
| `saving` | another request is just saving it |
| `opted_out` | the request asked not to load |

A stored chunk behind one that is missing cannot be used, and counts with the one before it.

## All metrics

| metric | type | labels | meaning |
|---|---|---|---|
"""


def reference_text() -> str:
    """The whole page."""
    rows = []
    for metric in CATALOG:
        labels = "; ".join(_label(label) for label in metric.labels) or "–"
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return _HEAD + "\n".join(rows) + "\n"


def _label(label: Label) -> str:
    if label.fact:
        return f"`{label.name}`: {label.fact}"
    values = [f"`{value}`" for value in label.values]
    if label.tiers:
        values.append("names of tiers")
    return f"`{label.name}`: {', '.join(values)}"


if __name__ == "__main__":
    sys.stdout.write(reference_text())
