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
    url: Annotated[str, typer.Argument(help="The server: any that speaks OpenAI's API.")] = "http://127.0.0.1:8080",
    *,
    model: Annotated[str, typer.Option(help="Model to ask for; empty: the first one that the server lists.")] = "",
    concurrency: Annotated[str, typer.Option(metavar="N,...", help="Streams at once; each number is a run.")] = "1",
    requests: Annotated[
        int, typer.Option(min=0, help="Requests of each run; 0: four for each stream, and at least 20.")
    ] = 0,
    warmup: Annotated[int, typer.Option(min=1, help="Requests before that, not measured.")] = 1,
    input_tokens: Annotated[int, typer.Option(min=3, max=100_000, help="About so many tokens a prompt.")] = 200,
    output_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 100,
    stream: Annotated[bool, typer.Option(help="Read answers as they come; else whole.")] = True,
    exact: Annotated[
        bool, typer.Option("--exact", help="Answers of just that many tokens (ignore_eos), where the server can.")
    ] = False,
    endpoint: Annotated[Literal["chat", "completions"], typer.Option(help="The path to ask.")] = "chat",
    triton: Annotated[
        str, typer.Option(metavar="HOST:PORT|PATH", help="Ask this Triton over gRPC, and nothing else; needs --model.")
    ] = "",
    server_pid: Annotated[
        int | None, typer.Option(metavar="PID", help="The server's process here: its processor time a token is told.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.", envvar="SHOAL_BENCH_API_KEY")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure how a server generates: first token, between tokens, tokens a second. Every prompt is sent once only."""
    from shoal.bench.chat import ChatPlan, measure_http

    plan = ChatPlan(
        model=model, concurrency=_parse_numbers(concurrency), requests=requests, warmup=warmup,
        input_tokens=input_tokens, output_tokens=output_tokens, stream=stream, exact=exact, endpoint=endpoint,
        server_pid=server_pid,
    )  # fmt: skip
    if triton and not model:
        raise ConfigError("--triton: name the model with --model", param="--model")
    place = f"triton://{triton}" if triton else url
    levels = run_benchmark(measure_grpc(triton, plan) if triton else measure_http(url, plan, key=api_key), url)
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
        reason = f"give numbers from 1 to {MAX_STREAMS} with commas between, such as 1,8,64"
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
        lines.append(f"{'Server CPU (us a token)':32}{found.server_cpu_us:>11,.2f}")
    if found.tokens_by == "chunks" and plan.stream:
        lines.append("the server does not count tokens: those above are its chunks")
    errors = ", ".join(f"{count} x {name}" for name, count in found.errors.items())
    lines.append(f"errors: {errors or 'none'}")
    return "\n".join(lines)
