"""`shoal bench`: load a running server and report its performance. Without a subcommand it measures embeddings."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.cli._benchmark import run_benchmark, to_json
from shoal.cli._commands import make_group
from shoal.cli.bench_chat import chat

if TYPE_CHECKING:
    from shoal.bench.run import Plan
    from shoal.bench.stats import Summary


def bench(
    url: Annotated[str, typer.Argument(help="URL of the server.")] = "http://127.0.0.1:8080",
    *,
    model: Annotated[str, typer.Option(help="Model to request; empty: the default one.")] = "",
    clients: Annotated[
        int, typer.Option(min=1, max=20000, help="Concurrent connections, each with one request at a time.")
    ] = 64,
    duration: Annotated[float, typer.Option(min=0.1, help="Duration of the measurement in seconds.")] = 10.0,
    warmup: Annotated[float, typer.Option(min=0, help="Warm-up in seconds, not measured.")] = 2.0,
    tokens: Annotated[int, typer.Option(min=5, max=8192, help="Tokens per text, special tokens included.")] = 16,
    texts_per_request: Annotated[int, typer.Option(min=1, max=2048, help="Texts per request.")] = 1,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Requests per second, whatever the answers do (open loop).")
    ] = None,
    surface: Annotated[Literal["openai", "tei", "embedding"], typer.Option(help="API to use.")] = "openai",
    encoding: Annotated[
        Literal["float", "base64"], typer.Option(help="Encoding of the vectors with openai.")
    ] = "float",
    api_key: Annotated[
        str | None, typer.Option(help="API key, sent as a bearer token.", envvar="SHOAL_BENCH_API_KEY")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a running server: throughput, latency percentiles and batches. Every text is sent once only."""
    from shoal.bench.run import Plan, measure

    plan = Plan(
        url=url, model=model, clients=clients, duration=duration, warmup=warmup, tokens=tokens,
        texts=texts_per_request, rate=rate, surface=surface, encoding=encoding, key=api_key,
    )  # fmt: skip
    summary, counted = run_benchmark(lambda: measure(plan), url)
    if as_json:
        plan_fields = {name: value for name, value in asdict(plan).items() if name != "key"}
        typer.echo(to_json({"plan": plan_fields, "tokens_each": counted, "result": summary}))
    else:
        typer.echo(_text(plan, summary, counted))
    if not summary.requests:
        raise typer.Exit(1)


def _text(plan: Plan, summary: Summary, counted: float | None) -> str:
    loop = f"{plan.clients} clients" if plan.rate is None else f"{plan.rate:g} requests/s"
    length = f"{counted:g} tokens (counted by the server)" if counted else f"about {plan.tokens} tokens"
    lines = [
        f"{plan.url}  {plan.surface}  {loop}, {plan.texts} text(s) per request, {length}, {plan.duration:g} s",
        f"throughput  {summary.texts_per_s:,.1f} texts/s   {summary.requests_per_s:,.1f} requests/s",
        "latency     " + "   ".join(f"{name} {value:,.2f}" for name, value in summary.latency_ms.items()) + "  ms",
    ]
    if summary.batch_size is not None:
        waits = "   ".join(f"{name} {summary.queue_ms[name]:,.2f}" for name in ("p50", "p99") if summary.queue_ms)
        lines.append(f"batches     mean size {summary.batch_size:g}   queue {waits} ms")
    errors = ", ".join(f"{count} x {name}" for name, count in summary.errors.items())
    lines.append(f"errors      {errors or 'none'}")
    return "\n".join(lines)


app = make_group(
    "bench",
    "Measure a running server; `shoal bench [URL]` is short for `shoal bench embed [URL]`.",
    {"embed": bench, "chat": chat},
    default="embed",
)
