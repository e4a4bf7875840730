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
| `tail` | after the last whole chunk; the last token is always computed |
| `declined` | TierKV does not serve the request, see `tierkv_declined_requests_total` |

Without faults the sum over outcomes equals `vllm:external_prefix_cache_queries`, and `hit` equals
`vllm:external_prefix_cache_hits`; a test checks both.

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
    values = [f"`{value}`" for value in label.values]
    if label.tiers:
        values.append("names of tiers")
    return f"`{label.name}`: {', '.join(values)}"


if __name__ == "__main__":
    sys.stdout.write(reference_text())
