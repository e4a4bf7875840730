# SPDX-License-Identifier: Apache-2.0
"""Writes dashboards/tierkv.json, the Grafana dashboard.

    python scripts/make_dashboard.py

A dashboard of a thousand lines of JSON cannot be reviewed; this can. Whoever edits in Grafana
brings the change here. A test compares the two, and the expressions with the list of metrics.
"""

import json
from pathlib import Path

TARGET = Path(__file__).parents[1] / "dashboards" / "tierkv.json"

WHERE = 'instance=~"$instance", model_name=~"$model_name"'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
"""Columns of Grafana's grid."""


def rate(metric, labels="", by=""):
    """Per second, summed over engines."""
    inner = f"{WHERE}, {labels}" if labels else WHERE
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({metric}{{{inner}}}[$__rate_interval]))"


def gauge(metric, by, how="sum"):
    return f"{how} by ({by}) ({metric}{{{WHERE}}})"


def quantiles(metric, by, labels=""):
    """Targets for the median and the 99th percentile of a histogram."""
    buckets = rate(f"{metric}_bucket", labels, f"le, {by}")
    return [
        (f"histogram_quantile({q}, {buckets})", f"{{{{{by}}}}} {name}")
        for q, name in ((0.5, "p50"), (0.99, "p99"))
    ]


QUERIES = rate("tierkv_query_tokens_total")
HITS = rate("tierkv_query_tokens_total", 'outcome="hit"')
GPU = rate("tierkv_gpu_hit_tokens_total")
AVOIDABLE = rate("tierkv_query_tokens_total", 'outcome=~"failed|late|unavailable|skipped"')
SHADOWS = rate("tierkv_blend_shadows_total")
SHADOWS_AGREE = rate("tierkv_blend_shadows_total", 'agree="yes"')
HIT_BY_TIER = rate("tierkv_query_tokens_total", 'outcome="hit"', "tier")


def panel(kind, title, text, targets, unit="short", width=8, height=8, **more):
    """One panel; `targets` is a list of (expression, legend)."""
    defaults = {"unit": unit, "noValue": "–", **more.pop("defaults", {})}
    made = {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": SOURCE,
        "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": more.pop("overrides", [])},
        "options": {},
        "targets": [
            {"refId": chr(65 + at), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for at, (expr, legend) in enumerate(targets)
        ],
    }
    made.update(more)
    return made


def number(title, text, expr, unit="percentunit"):
    options = {"graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return panel("stat", title, text, [(expr, "")], unit, 4, 4, options=options)


def lines(title, text, targets, unit="short", width=8, stacked=False, **more):
    custom = {"fillOpacity": 30 if stacked else 8, "lineWidth": 1, "showPoints": "never"}
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults = {"custom": custom, "min": 0}
    options = {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    more = {"defaults": defaults, "options": options, **more}
    return panel("timeseries", title, text, targets, unit, width, **more)


ROWS = {
    "Overview": [
        number("Hit rate", "Hit tokens ÷ query tokens.", f"{HITS} / {QUERIES}"),
        number(
            "GPU hits",
            "Prompt tokens that the engine's own prefix cache held, of all prompt tokens.",
            f"{GPU} / ({GPU} + {QUERIES})",
        ),
        number(
            "Prefill avoided",
            "GPU hits and TierKV's hits together, of all prompt tokens.",
            f"({GPU} + {HITS}) / ({GPU} + {QUERIES})",
        ),
        number(
            "Avoidable loss",
            "Query tokens that faster or healthier tiers would have made hits.",
            f"{AVOIDABLE} / {QUERIES}",
        ),
        number(
            "Prefill saved",
            "Estimated seconds of prefill saved in each second.",
            rate("tierkv_saved_prefill_seconds_total"),
            "s",
        ),
        number("Query tokens / s", "Prompt tokens that the GPU did not hold.", QUERIES, "short"),
        lines(
            "Hit rate by tier",
            "Adds up to the hit rate. A tier is the one that held the bytes when asked.",
            [(f"{HIT_BY_TIER} / ignoring(tier) group_left () {QUERIES}", "{{tier}}")],
            "percentunit",
            stacked=True,
        ),
        lines(
            "Query tokens by outcome",
            "Each query token has exactly one outcome.",
            [(rate("tierkv_query_tokens_total", by="outcome"), "{{outcome}}")],
            stacked=True,
        ),
        lines(
            "Missed tokens by reason",
            "Why what missed was not stored; the tier is the lowest that had it.",
            [(rate("tierkv_miss_tokens_total", by="reason, tier"), "{{reason}} {{tier}}")],
            stacked=True,
        ),
    ],
    "Per tier": [
        lines(
            "Used",
            "Bytes in use, and as a dashed line the most that the tier may use.",
            [
                (gauge("tierkv_used_bytes", "tier"), "{{tier}}"),
                (gauge("tierkv_capacity_bytes", "tier"), "{{tier}} capacity"),
            ],
            "bytes",
            overrides=[
                {
                    "matcher": {"id": "byRegexp", "options": "/ capacity$/"},
                    "properties": [
                        {"id": "custom.lineStyle", "value": {"dash": [8, 8], "fill": "dash"}},
                        {"id": "custom.fillOpacity", "value": 0},
                    ],
                }
            ],
        ),
        lines(
            "Bytes moved",
            "Below DRAM, to and from the medium.",
            [(rate("tierkv_io_bytes_total", by="tier, op"), "{{tier}} {{op}}")],
            "Bps",
        ),
        lines(
            "Chunks copied between tiers",
            "By what caused it.",
            [
                (
                    rate("tierkv_moves_total", by="source, target, reason"),
                    "{{source}} → {{target}} {{reason}}",
                )
            ],
        ),
        lines(
            "Lookups",
            "Chunks asked for at admission, by what the tier said.",
            [(rate("tierkv_lookup_chunks_total", by="tier, result"), "{{tier}} {{result}}")],
        ),
        lines(
            "Evictions",
            "Chunks a tier gave up.",
            [(rate("tierkv_evictions_total", by="tier, reason"), "{{tier}} {{reason}}")],
        ),
        lines(
            "Queues",
            "Chunks waiting for or in I/O.",
            [(gauge("tierkv_queue_depth", "tier, op"), "{{tier}} {{op}}")],
        ),
    ],
    "Errors and breakers": [
        panel(
            "state-timeline",
            "Breakers",
            "Whether a tier is asked: closed (yes), half-open (one probe), open (no).",
            [(gauge("tierkv_breaker_state", "instance, tier", "max"), "{{instance}} {{tier}}")],
            width=12,
            defaults={
                "mappings": [
                    {
                        "type": "value",
                        "options": {
                            "0": {"text": "closed", "color": "green", "index": 0},
                            "1": {"text": "half-open", "color": "yellow", "index": 1},
                            "2": {"text": "open", "color": "red", "index": 2},
                        },
                    }
                ]
            },
        ),
        lines(
            "Errors",
            "Operations on a tier that failed; the requests were computed instead.",
            [(rate("tierkv_errors_total", by="tier, kind"), "{{tier}} {{kind}}")],
            width=12,
        ),
        lines(
            "Saves dropped",
            "Chunks that were to be saved and were not.",
            [(rate("tierkv_saves_dropped_total", by="tier, reason"), "{{tier}} {{reason}}")],
            width=12,
        ),
        lines(
            "Requests declined, engines without TierKV",
            "Requests that ran as if TierKV were absent; engines that serve without it altogether.",
            [
                (rate("tierkv_declined_requests_total", by="reason"), "{{reason}} / s"),
                (
                    gauge("tierkv_aside", "instance, reason", "max"),
                    "{{instance}} aside: {{reason}}",
                ),
            ],
            width=12,
        ),
    ],
    "Latency": [
        lines(
            "One chunk's load",
            "Time on the tier, queueing excluded.",
            quantiles("tierkv_io_duration_seconds", "tier", 'op="load"'),
            "s",
        ),
        lines(
            "One chunk's save",
            "Time on the tier, queueing excluded.",
            quantiles("tierkv_io_duration_seconds", "tier", 'op="save"'),
            "s",
        ),
        lines(
            "Does it pay?",
            "Seconds of prefill saved (estimated) and seconds waited for loads, in each second.",
            [
                (rate("tierkv_saved_prefill_seconds_total"), "prefill saved"),
                (rate("tierkv_load_seconds_total"), "waited for loads"),
            ],
            "s",
        ),
        lines(
            "Time to the first token",
            "vLLM's own.",
            quantiles("vllm:time_to_first_token_seconds", "model_name"),
            "s",
            12,
        ),
        lines(
            "Leased DRAM slots, bytes in flight",
            "What copies and I/O keep from eviction.",
            [
                (gauge("tierkv_leased_slots", "instance"), "{{instance}} slots"),
                (gauge("tierkv_inflight_bytes", "tier, op"), "{{tier}} {{op}} bytes"),
            ],
            width=12,
        ),
    ],
    "Any-text reuse": [
        lines(
            "Tokens of blended prompts",
            "Taken from text that stood elsewhere, or computed anew.",
            [(rate("tierkv_blend_tokens_total", by="kind"), "{{kind}}")],
            stacked=True,
        ),
        lines(
            "Blended prompts, and why others were not",
            "Prompts a second.",
            [
                (rate("tierkv_blend_requests_total", by="outcome"), "{{outcome}}"),
                (rate("tierkv_blend_declined_total", by="reason"), "not: {{reason}}"),
            ],
        ),
        lines(
            "Agreement with full computation",
            "Of the blended prompts that were computed in full too: the same most likely token.",
            [
                (
                    SHADOWS_AGREE + " / " + SHADOWS,
                    "agree",
                )
            ],
            "percentunit",
        ),
    ],
}


def variable(name, label, query):
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def layout():
    """All panels with ids and places: rows from top to bottom, panels from left to right."""
    panels, y = [], 0
    for title, members in ROWS.items():
        row = {"type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append({**row, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})
        x, y, tallest = 0, y + 1, 0
        for member in members:
            size = member["gridPos"]
            if x + size["w"] > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            member["gridPos"] = {"x": x, "y": y, **size}
            x, tallest = x + size["w"], max(tallest, size["h"])
            panels.append(member)
        y += tallest
    return [{**made, "id": number} for number, made in enumerate(panels, 1)]


def dashboard():
    """The whole as a JSON value."""
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    }
    instance = "label_values(tierkv_query_tokens_total, instance)"
    model = 'label_values(tierkv_query_tokens_total{instance=~"$instance"}, model_name)'
    return {
        "uid": "tierkv",
        "title": "TierKV",
        "description": "Where prompt tokens come from, what the tiers do, and what goes wrong.",
        "tags": ["tierkv", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                source,
                variable("instance", "Instance", instance),
                variable("model_name", "Model", model),
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": layout(),
    }


def text():
    """As the file has it: sorted keys, so that equal dashboards are equal files."""
    return json.dumps(dashboard(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
