"""The Grafana dashboard of Shoal as a table: `python deploy/grafana/dashboard.py` writes dashboards/shoal.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).parent / "dashboards" / "shoal.json"

OF = '{instance=~"$instance", model=~"$model"}'
ALL = '{instance=~"$instance"}'
EACH = "[$__rate_interval]"
WIDTH, HEIGHT = 8, 8
"""Of a panel, on a grid that is 24 wide."""


class Panel(NamedTuple):
    """`queries` are (expression, legend). `kind`: Grafana's type of panel. `unit`: one of Grafana's."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str = ""
    kind: str = "timeseries"


def rate(metric: str, *by: str, where: str = OF) -> str:
    return f"sum by ({', '.join(by)}) (rate({metric}{where}{EACH}))"


def quantiles(metric: str, *by: str, where: str = OF) -> tuple[tuple[str, str], ...]:
    """The median, 95th and 99th percentile of a histogram."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return tuple(
        (
            f"histogram_quantile({fraction}, {rate(f'{metric}_bucket', *by, 'le', where=where)})",
            f"p{fraction * 100:g} {legend}",
        )
        for fraction in (0.5, 0.95, 0.99)
    )


def share(part: str, *whole: str) -> str:
    """One rate over the sum of others, by model."""
    return f"{rate(part, 'model')} / ({' + '.join(rate(each, 'model') for each in whole)})"


def labelled(label: str, value: str, operator: str = "=") -> str:
    return f'{OF[:-1]}, {label}{operator}"{value}"}}'


TABLE: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel("Requests", "reqps", ((rate("shoal_requests_total", "model", "task"), "{{model}} {{task}}"),)),
        Panel(
            "Errors",
            "reqps",
            (
                (
                    rate("shoal_requests_total", "model", "outcome", where=labelled("outcome", "ok", "!=")),
                    "{{model}} {{outcome}}",
                ),
            ),
            "Requests that were accepted and failed, or whose client left.",
        ),
        Panel(
            "By surface",
            "reqps",
            ((rate("shoal_requests_total", "surface", "outcome"), "{{surface}} {{outcome}}"),),
            "Which API clients use, and how its requests end.",
        ),
        Panel(
            "Latency by surface (p95)",
            "s",
            ((f"histogram_quantile(0.95, {rate('shoal_request_seconds_bucket', 'surface', 'le')})", "{{surface}}"),),
        ),
        Panel(
            "Refused",
            "reqps",
            ((rate("shoal_refused_total", "reason", "surface", where=ALL), "{{surface}} {{reason}}"),),
            "Requests that never reached a model: invalid ones, missing keys, unknown models.",
        ),
        Panel("Latency", "s", quantiles("shoal_request_seconds", "model", "task")),
        Panel(
            "Stages (p95)",
            "s",
            ((f"histogram_quantile(0.95, {rate('shoal_stage_seconds_bucket', 'stage', 'le')})", "{{stage}}"),),
        ),
        Panel("In flight", "short", ((f"sum by (model, task) (shoal_requests_in_flight{OF})", "{{model}} {{task}}"),)),
    ),
    "Queue and batches": (
        Panel(
            "Queue",
            "short",
            (
                (f"sum by (model) (shoal_queue_tokens{OF})", "{{model}} tokens"),
                (f"sum by (model) (shoal_queue_items{OF})", "{{model}} items"),
            ),
        ),
        Panel("Queue time", "s", quantiles("shoal_stage_seconds", "model", where=labelled("stage", "queue"))),
        Panel(
            "Mean batch size",
            "short",
            ((share("shoal_batch_size_sum", "shoal_batch_size_count"), "{{model}}"),),
            "Items. Near 1 under load: too many slots, or too few users.",
        ),
        Panel(
            "Batch sizes",
            "short",
            ((rate("shoal_batch_size_bucket", "le"), "{{le}}"),),
            "Batches per second, by items.",
            "heatmap",
        ),
        Panel(
            "Batches",
            "ops",
            ((rate("shoal_batches_total", "model", "flush"), "{{model}} {{flush}}"),),
            "By why they left: idle slot, full, age.",
        ),
        Panel(
            "Padding",
            "percentunit",
            (
                (
                    "1 - " + share("shoal_batch_tokens_sum", "shoal_batch_padded_tokens_total"),
                    "{{model}}",
                ),
            ),
            "Share of the computed tokens that are padding.",
        ),
    ),
    "Tokens": (
        Panel(
            "Embedded tokens per second",
            "short",
            ((rate("shoal_tokens_total", "model", "task"), "{{model}} {{task}}"),),
        ),
        Panel(
            "Generated tokens per second",
            "short",
            (
                (rate("shoal_generated_tokens_total", "model"), "{{model}} generated"),
                (rate("shoal_prompt_tokens_total", "model"), "{{model}} read"),
            ),
        ),
        Panel("First token", "s", quantiles("shoal_first_token_seconds", "model")),
        Panel("Time per token", "s", quantiles("shoal_token_seconds", "model")),
        Panel("Truncated inputs", "short", ((rate("shoal_truncated_total", "model"), "{{model}}"),)),
    ),
    "Replicas and models": (
        Panel(
            "Engine calls (p95)",
            "s",
            (
                (
                    f"histogram_quantile(0.95, {rate('shoal_batch_seconds_bucket', 'model', 'replica', 'le')})",
                    "{{model}} {{replica}}",
                ),
            ),
        ),
        Panel("Failed engine calls", "ops", ((rate("shoal_batch_errors_total", "kind", where=ALL), "{{kind}}"),)),
        Panel(
            "Ejected replicas",
            "short",
            ((f"max by (model, replica) (shoal_replica_ejected{OF})", "{{model}} {{replica}}"),),
            "1: out of the rotation, because it failed repeatedly.",
        ),
        Panel(
            "Ejections in an hour",
            "short",
            ((f"sum by (model, replica) (increase(shoal_replica_ejections_total{OF}[1h]))", "{{model}} {{replica}}"),),
        ),
        Panel("Models by state", "short", ((f"sum by (state) (shoal_model_state{OF})", "{{state}}"),)),
        Panel(
            "Cache hits",
            "percentunit",
            (
                (
                    share("shoal_cache_hits_total", "shoal_cache_hits_total", "shoal_cache_misses_total"),
                    "{{model}}",
                ),
            ),
            "For models with a cache.",
        ),
        Panel("Cache size", "bytes", ((f"sum by (model, place) (shoal_cache_bytes{OF})", "{{model}} {{place}}"),)),
    ),
    "Process": (
        Panel(
            "Memory",
            "bytes",
            ((f'process_resident_memory_bytes{ALL[:-1]}, job="shoal"}}', "{{instance}}"),),
            "Of all processes of a server.",
        ),
        Panel(
            "Processors",
            "short",
            ((f'rate(process_cpu_seconds_total{ALL[:-1]}, job="shoal"}}{EACH})', "{{instance}}"),),
            "Cores in use.",
        ),
        Panel(
            "Event loop lag (p99)",
            "s",
            (
                (
                    f"histogram_quantile(0.99, {rate('shoal_loop_lag_seconds_bucket', 'instance', 'le', where=ALL)})",
                    "{{instance}}",
                ),
            ),
            "Above 0.1 s: something blocks the loop.",
        ),
        Panel("File descriptors", "short", ((f'process_open_fds{ALL[:-1]}, job="shoal"}}', "{{instance}}"),)),
    ),
}


def build() -> dict[str, Any]:
    """Build the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in TABLE.items():
        panels.append(
            {"type": "row", "title": title, "id": len(panels) + 1, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
        )
        for at, panel in enumerate(row):
            place = {"x": at % 3 * WIDTH, "y": y + 1 + at // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_build_panel(panel, len(panels) + 1, place))
        y += 1 + -(-len(row) // 3) * HEIGHT
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        _build_variable("instance", "label_values(shoal_model_state, instance)"),
        _build_variable("model", 'label_values(shoal_model_state{instance=~"$instance"}, model)'),
    ]
    return {
        "title": "Shoal",
        "uid": "shoal",
        "tags": ["shoal"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def _build_panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    is_heatmap = panel.kind == "heatmap"
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "id": number,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {} if is_heatmap else {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {
                "refId": chr(65 + at),
                "expr": query,
                "legendFormat": legend,
                "format": panel.kind if is_heatmap else "time_series",
            }
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }


def _build_variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def render() -> str:
    return json.dumps(build(), indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render())
