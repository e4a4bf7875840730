# SPDX-License-Identifier: Apache-2.0
"""The dashboard, the alert rules and the example that starts them name only what exists."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tierkv.telemetry.catalog import BY_NAME, Kind

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "dashboards" / "tierkv.json"
ALERTS = ROOT / "dashboards" / "alerts.yml"
EXAMPLE = ROOT / "examples" / "monitoring"

FOREIGN_LABELS = {"instance", "job", "model_name", "engine"}
"""From Prometheus, and from vLLM in front of TierKV's own."""
VLLM = {"vllm:time_to_first_token_seconds_bucket": {"le"}}
"""vLLM's own metrics that are used, with their labels."""
TIERS = {"dram", "disk", "redis"}
"""Names that tiers have if nobody gives others."""


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def generator() -> ModuleType:
    path = ROOT / "scripts" / "make_dashboard.py"
    spec = importlib.util.spec_from_file_location("make_dashboard", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rules() -> list[dict[str, Any]]:
    return [rule for group in load_yaml(ALERTS)["groups"] for rule in group["rules"]]


def recorded() -> dict[str, set[str]]:
    """Names that the rules record, with the labels that they keep."""
    return {r["record"]: {"instance", "model_name"} for r in rules() if "record" in r}


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression), with Grafana's variables as it would fill them in."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"].replace("$__rate_interval", "5m")
    for rule in rules():
        yield f"rule {rule.get('alert') or rule['record']}", rule["expr"]


def nodes(expression: Any) -> Iterator[Any]:
    """Every node of a parsed expression."""
    found: list[Any] = []
    promql.walk(expression, lambda node: found.append(node) or True)
    return iter(found)


def labels_of(name: str) -> dict[str, set[str]] | None:
    """Labels of a metric as Prometheus has it, with their values; None: there is no such metric."""
    foreign: dict[str, set[str]] = {label: set() for label in FOREIGN_LABELS}
    if name in recorded():
        return {label: set() for label in recorded()[name]}
    if name in VLLM:
        return foreign | {label: set() for label in VLLM[name]}
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    metric = BY_NAME.get(name)
    if metric is None or metric.kind is Kind.HISTOGRAM:
        metric = BY_NAME.get(base)
        if metric is None or metric.kind is not Kind.HISTOGRAM or base == name:
            return None
        if name.endswith("_bucket"):
            foreign["le"] = set()
    return foreign | {
        label.name: set(label.values) | (TIERS if label.tiers else set()) for label in metric.labels
    }


def problems(expression: str) -> list[str]:
    """What an expression names that does not exist."""
    found = []
    used: set[str] = set()  # labels that some metric of the expression has
    grouped: set[str] = set()
    for node in nodes(promql.parse(expression)):
        if isinstance(node, promql.VectorSelector):
            labels = labels_of(node.name)
            if labels is None:
                found.append(f"no metric {node.name}")
                continue
            used |= labels.keys()
            for matcher in node.matchers.matchers:
                if matcher.name not in labels:
                    found.append(f"{node.name} has no label {matcher.name}")
                elif labels[matcher.name] and not matcher.value.startswith("$"):
                    unknown = set(matcher.value.split("|")) - labels[matcher.name]
                    found += [f"{node.name}: {matcher.name} is never {v}" for v in unknown]
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            grouped |= set(node.modifier.labels)
    return found + [f"no metric has the label {label}" for label in grouped - used]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_expression_names_existing_metrics_labels_and_values(
    where: str, expression: str
) -> None:
    assert problems(expression) == [], where


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("rate(tierkv_query_token_total[5m])", "no metric tierkv_query_token_total"),
        ('tierkv_chunks{reason="x"}', "tierkv_chunks has no label reason"),
        ('tierkv_errors_total{kind=~"checksum|bad"}', "tierkv_errors_total: kind is never bad"),
        ("sum by (tiers) (tierkv_chunks)", "no metric has the label tiers"),
        ("tierkv_io_duration_seconds", "no metric tierkv_io_duration_seconds"),
        ("tierkv_chunks_bucket", "no metric tierkv_chunks_bucket"),
        ("tierkv:hit_rate:5m", "no metric tierkv:hit_rate:5m"),
    ],
)
def test_the_check_finds_what_is_wrong(wrong: str, said: str) -> None:
    assert problems(wrong) == [said]


def test_counters_are_only_used_as_rates() -> None:
    rated = re.compile(r"\b(?:rate|increase)\(\s*(tierkv_\w+)")
    for where, expression in expressions():
        names = re.findall(r"\btierkv_\w+", expression)
        for name in names:
            if name in BY_NAME and BY_NAME[name].kind is Kind.COUNTER:
                assert names.count(name) == rated.findall(expression).count(name), where


def test_the_dashboard_is_what_its_script_writes() -> None:
    assert DASHBOARD.read_text() == generator().text()


def test_every_metric_is_on_the_dashboard_or_left_out_on_purpose() -> None:
    text = DASHBOARD.read_text()
    missing = {name for name in BY_NAME if name not in text}
    # Facts and details for which a page of its own is the better place.
    assert missing <= {
        "tierkv_build_info",
        "tierkv_chunks",
        "tierkv_pinned_slots",
        "tierkv_engine_blocks_total",
        "tierkv_blend_seconds_total",
        "tierkv_blend_shadow_kl_nats_total",
    }, missing


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y) for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }  # fmt: skip
        assert not cells & taken, panel["title"]
        taken |= cells
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows[:4] == ["Overview", "Per tier", "Errors and breakers", "Latency"]


def test_every_panel_follows_the_variables() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names == ["datasource", "instance", "model_name"]
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            for selector in re.findall(r"\{([^{}]*)\}", target["expr"]):
                assert 'instance=~"$instance", model_name=~"$model_name"' in selector


def test_every_alert_says_what_it_means_and_how_bad_it_is() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 5
    for alert in alerts:
        assert alert["labels"]["severity"] in {"info", "warning"}
        assert alert["annotations"].keys() == {"summary", "description"}
        kept = set(re.findall(r"\$labels\.(\w+)", json.dumps(alert["annotations"])))
        grouped = {"instance", "model_name"}
        for node in nodes(promql.parse(alert["expr"])):
            if isinstance(node, promql.AggregateExpr):
                grouped |= set(node.modifier.labels)
        assert kept <= grouped, alert["alert"]


def test_vllms_own_metrics_that_are_used_exist() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    for name in VLLM:
        assert f'"{name.removesuffix("_bucket")}"' in source


# -- the example ---------------------------------------------------------------------------------


def test_the_example_mounts_what_is_there_and_listens_on_this_machine_only() -> None:
    compose = load_yaml(EXAMPLE / "compose.yml")
    for service in compose["services"].values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (EXAMPLE / source).resolve().exists(), volume
                assert volume.endswith(":ro")
            else:
                assert source in compose["volumes"]
    assert "--web.listen-address=127.0.0.1:9090" in compose["services"]["prometheus"]["command"]
    assert compose["services"]["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert all(isinstance(v, str) for v in compose["services"]["grafana"]["environment"].values())


def test_grafana_finds_prometheus_and_the_dashboard_where_compose_puts_them() -> None:
    compose = load_yaml(EXAMPLE / "compose.yml")["services"]
    source = load_yaml(EXAMPLE / "grafana" / "datasources" / "prometheus.yml")["datasources"][0]
    prometheus = load_yaml(EXAMPLE / "prometheus.yml")
    assert source["url"] == "http://localhost:9090"
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    assert prometheus["rule_files"] == ["alerts.yml"]
    provider = load_yaml(EXAMPLE / "grafana" / "dashboards" / "tierkv.yml")["providers"][0]
    mounts = [volume.split(":")[1] for volume in compose["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/tierkv.json" in mounts
    home = compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in mounts


# -- with Prometheus's own tool ------------------------------------------------------------------

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian and Ubuntu: apt-get install prometheus)",
)


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_accepts_the_example(tmp_path: Path) -> None:
    for file in (EXAMPLE / "prometheus.yml", ALERTS):  # side by side, as compose mounts them
        shutil.copy(file, tmp_path)
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", str(ROOT / "dashboards" / "alerts_test.yml"))
