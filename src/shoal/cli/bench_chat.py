"""`shoal bench chat`: time the streams of a language model on a server token by token."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.cli._benchmark import run_benchmark, to_json
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.bench.answers import Level
    from shoal.bench.chat import ChatPlan

MAX_STREAMS = 4096


def chat(
    url: Annotated[str, typer.Argument(help="URL of any server with OpenAI's API.")] = "http://127.0.0.1:8080",
    *,
    model: Annotated[str, typer.Option(help="Model to request; empty: the first one listed by the server.")] = "",
    concurrency: Annotated[
        str, typer.Option(metavar="N,...", help="Concurrent streams; one run for each number.")
    ] = "1",
    requests: Annotated[int, typer.Option(min=0, help="Requests per run; 0: four per stream, at least 20.")] = 0,
    warmup: Annotated[int, typer.Option(min=1, help="Warm-up requests, not measured.")] = 1,
    input_tokens: Annotated[int, typer.Option(min=3, max=100_000, help="Approximate tokens per prompt.")] = 200,
    output_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate.")] = 100,
    stream: Annotated[bool, typer.Option(help="Stream the answers; otherwise read them whole.")] = True,
    exact: Annotated[
        bool, typer.Option("--exact", help="Generate exactly that many tokens (ignore_eos), if the server supports it.")
    ] = False,
    endpoint: Annotated[Literal["chat", "completions"], typer.Option(help="Path to request.")] = "chat",
    triton: Annotated[
        str, typer.Option(metavar="HOST:PORT|PATH", help="Measure this Triton over gRPC instead; requires --model.")
    ] = "",
    server_pid: Annotated[
        int | None, typer.Option(metavar="PID", help="PID of a local server, to report its CPU time per token.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key, sent as a bearer token.", envvar="SHOAL_BENCH_API_KEY")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure generation: first token, between tokens, tokens per second. Every prompt is sent only once."""
    from shoal.bench.chat import ChatPlan, measure_http

    plan = ChatPlan(
        model=model, concurrency=_parse_numbers(concurrency), requests=requests, warmup=warmup,
        input_tokens=input_tokens, output_tokens=output_tokens, stream=stream, exact=exact, endpoint=endpoint,
        server_pid=server_pid,
    )  # fmt: skip
    if triton and not model:
        raise ConfigError("--triton: name the model with --model", param="--model")
    place = f"triton://{triton}" if triton else url
    levels = run_benchmark(lambda: measure_grpc(triton, plan) if triton else measure_http(url, plan, key=api_key), url)
    if as_json:
        typer.echo(to_json({"server": place, "plan": asdict(plan), "results": levels}))
    else:
        typer.echo("\n\n".join(text(place, plan, one) for one in levels))
    if not all(one.requests for one in levels):
        raise typer.Exit(1)


def _parse_numbers(option: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in option.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < number <= MAX_STREAMS for number in found):
        reason = f"give numbers from 1 to {MAX_STREAMS}, separated by commas, such as 1,8,64"
        raise ConfigError(f"--concurrency {option}: {reason}", param="--concurrency")
    return found


async def measure_grpc(target: str, plan: ChatPlan) -> list[Level]:
    """Measure a Triton at each concurrency over one gRPC channel.

    Raises ShoalErrors, and RuntimeError if the server rejects the first request.
    """
    import time

    from shoal.backends.triton.client import Client
    from shoal.bench.chat import run_levels
    from shoal.cli._triton_stream import GrpcChatClient

    client = Client(target)
    try:
        return await run_levels(await GrpcChatClient.connect(client, plan), plan, time.time_ns())
    finally:
        await client.aclose()


def text(place: str, plan: ChatPlan, found: Level) -> str:
    """Format the figures of one run as the table of GenAI-Perf, with extra lines for figures without a distribution."""
    streams = f"{found.concurrency} stream{'s' if found.concurrency > 1 else ''}"
    lines = [
        f"{place}  {streams}, {found.requests} answers in {found.seconds:g} s",
        f"{'':32}" + "".join(f"{name:>11}" for name in ("avg", "min", "max", "p99", "p90", "p75")),
    ]
    for name, row in found.rows.items():
        cells = (row.avg, row.min, row.max, row.p99, row.p90, row.p75)
        lines.append(f"{name:32}" + "".join(f"{cell:>11,.2f}" for cell in cells))
    lines.append(f"{'Output Token Throughput (per s)':32}{found.output_tokens_per_s:>11,.2f}")
    lines.append(f"{'Request Throughput (per s)':32}{found.requests_per_s:>11,.2f}")
    if found.server_cpu_us is not None:
        lines.append(f"{'Server CPU (us per token)':32}{found.server_cpu_us:>11,.2f}")
    if found.tokens_by == "chunks" and plan.stream:
        lines.append("the server does not count tokens: the figures above count chunks")
    errors = ", ".join(f"{count} x {name}" for name, count in found.errors.items())
    lines.append(f"errors: {errors or 'none'}")
    return "\n".join(lines)
