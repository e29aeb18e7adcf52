"""results/*.json -> results/README.md: every figure with its machine, versions and method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ORDER = (
    "throughput",
    "efficiency",
    "long_texts",
    "peers",
    "peers_avx2",
    "graphs",
    "activations",
    "versus_st",
    "families",
    "parity",
    "int8",
    "torch_engine",
    "gpu",
    "scaling",
    "images",
    "tei_batching",
    "triton",
    "triton_llm",
    "fairness",
    "memory",
)
LEFT_OUT = ("rounds", "rows", "runs", "served", "tokens_checked", "installed")
"""Kept in the JSON files, too long for a page."""

CLOSE = ("cosine", "top1", "top10", "spearman", "difference")
"""In the names of figures of which two digits say nothing."""


def main() -> None:
    reports = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"), key=rank)]
    pages = ["# Benchmark results", "", "Written by `bench/render.py` from the JSON files beside it.", ""]
    for report in reports:
        pages += section(report)
    path = RESULTS / "README.md"
    path.write_text("\n".join(pages).rstrip() + "\n")
    print(f"wrote {path.name} from {len(reports)} results")


def rank(path: Path) -> tuple[int, str]:
    return (ORDER.index(path.stem) if path.stem in ORDER else len(ORDER), path.stem)


def section(report: dict[str, Any]) -> list[str]:
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    found = [
        f"## {report['benchmark']}",
        "",
        f"{report['date']} · {machine['processor']} · {machine['cores']} cores ({', '.join(machine['isa'])})"
        f" · {machine['memory_gb']} GB · {machine['system']} · Python {machine['python']}",
        "",
        versions,
        "",
        report["method"],
        "",
    ]
    served = report["results"].get("served")
    if isinstance(served, dict) and "id" in served:
        found += [f"Model: {served['id']}, precision {served.get('precision', '?')}", ""]
    plain = {
        name: value for name, value in report["results"].items() if not isinstance(value, dict) and name not in LEFT_OUT
    }
    if plain:
        found += table({"": plain})
    for name, value in report["results"].items():
        if isinstance(value, dict) and name not in LEFT_OUT:
            found += [f"### {name}", "", *tables(value)]
    return found


def tables(value: dict[str, Any]) -> list[str]:
    """Dictionaries with the same keys become rows of one table; others get a table each."""
    value = {name: one for name, one in value.items() if name not in LEFT_OUT}
    nested = {name: one for name, one in value.items() if isinstance(one, dict) and one}
    flat = {name: one for name, one in value.items() if not isinstance(one, dict)}
    found = table({"": flat}) if flat else []
    groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for name, one in nested.items():
        groups.setdefault(tuple(one), {})[name] = one
    for group in groups.values():
        if any(isinstance(cell, dict) for one in group.values() for cell in one.values()):
            for name, one in group.items():
                found += [f"#### {name}", "", *tables(one)]
        else:
            found += table(group)
    return found


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """One row a line; a lone row is turned into two columns, which reads better."""
    if len(rows) == 1:
        ((name, row),) = rows.items()
        lines = [
            f"| {name} | |",
            "|---|---:|",
            *(f"| {key} | {shown(value, name + key)} |" for key, value in row.items()),
        ]
    else:
        heads = list(next(iter(rows.values())))
        lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
        for name, row in rows.items():
            lines.append(f"| {name} | {' | '.join(shown(value, name + key) for key, value in row.items())} |")
    return [*lines, ""]


def shown(value: object, name: str) -> str:
    if isinstance(value, float):
        if any(each in name for each in CLOSE):
            return f"{value:.3g}" if "difference" in name else f"{value:.7g}"
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
