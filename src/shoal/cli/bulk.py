"""`shoal bulk`: run whole files through a model in this process, with restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

from shoal.cli._commands import MORE
from shoal.cli._completion import complete_model
from shoal.cli._options import with_settings
from shoal.config import LoadedConfig, Source
from shoal.errors import ConfigError, ShoalError

if TYPE_CHECKING:
    from shoal.bulk.computing import Task
    from shoal.bulk.reading import Columns
    from shoal.bulk.run import Summary
    from shoal.ray.bulk import Resources

_TASKS = {
    "embed": ("column", "dimensions", "input_type", "prompt_name", "normalize"),
    "rerank": ("query_column", "document_column", "raw_scores"),
    "generate": ("column", "system", "chat", "max_tokens", "temperature", "seed"),
}
"""Task -> the options that decide its results."""

_DEFAULTS = {"column": "text", "query_column": "query", "document_column": "document"}


@with_settings("Engine", "Batching", "Generation", "Cache", "Triton", "Model files")
def bulk(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model, as for serve.", autocompletion=complete_model)],
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="Files or globs: .txt (a text each line), .jsonl, .csv, .tsv, .parquet."
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder; the same command continues there.")],
    task: Annotated[str, typer.Option(metavar="embed|rerank|generate", help="What to do with each row.")] = "embed",
    column: Annotated[str | None, typer.Option(metavar="NAME", help="Text or prompt column, default text.")] = None,
    query_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Query column of rerank, default query.")
    ] = None,
    document_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Document column of rerank, default document.")
    ] = None,
    id_column: Annotated[str, typer.Option(metavar="NAME", help="Column to copy into the output as id.")] = "",
    form: Annotated[
        str,
        typer.Option("--format", metavar="npy|jsonl|parquet", help="Output format, default npy for embed, else jsonl."),
    ] = "",
    shard_rows: Annotated[int, typer.Option(min=1, metavar="N", help="Input rows per output shard.")] = 50_000,
    max_errors: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Stop after more unusable rows than this.")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=MORE, help="Truncate vectors to this length.")
    ] = None,
    input_type: Annotated[
        str | None, typer.Option(metavar="ROLE", rich_help_panel=MORE, help="Role of the texts: query or document.")
    ] = None,
    prompt_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=MORE, help="Name of the model's prompt to prepend to the texts."),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", rich_help_panel=MORE, help="Unit-length vectors, default on."),
    ] = None,
    raw_scores: Annotated[
        bool | None, typer.Option("--raw-scores", rich_help_panel=MORE, help="Scores before the activation.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", rich_help_panel=MORE, help="Apply the model's chat template, default on."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum tokens per answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, metavar="NUMBER", help="Sampling temperature.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", rich_help_panel=MORE, help="Sampling seed.")] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=MORE, help="Prompts generated at once.")
    ] = 16,
    ray: Annotated[int | None, typer.Option(min=1, metavar="N", help="Compute in N workers on Ray.")] = None,
    ray_cpus: Annotated[
        float | None,
        typer.Option(min=0, metavar="N", rich_help_panel=MORE, help="Cores per Ray worker, default an equal share."),
    ] = None,
    ray_gpus: Annotated[
        float | None, typer.Option(min=0, metavar="N", rich_help_panel=MORE, help="GPUs per Ray worker, default 0.")
    ] = None,
    loaded: LoadedConfig,
) -> None:
    """Run files through a model: texts to vectors, pairs to scores, prompts to answers.

    Writes shards of --shard-rows rows in input order. Unusable rows go to errors.jsonl with a reason. After an
    interruption, the same command continues: finished shards are kept, and checked by hash.
    """
    from shoal.bulk.reading import Columns, describe_inputs, find_files, import_parquet
    from shoal.bulk.tasks import check_format

    form = check_format(task, form)
    if form == "parquet":
        import_parquet()
    options = _collect_options(
        task,
        {
            "column": column,
            "query_column": query_column,
            "document_column": document_column,
            "dimensions": dimensions,
            "input_type": input_type,
            "prompt_name": prompt_name,
            "normalize": normalize,
            "raw_scores": raw_scores,
            "system": system,
            "chat": chat,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
        },
    )
    columns = Columns(tuple(options[name] for name in _TASKS[task] if name in _DEFAULTS), id_column)
    files = describe_inputs(find_files(inputs), columns)
    loaded = _adapt_settings(loaded)
    options |= {"id_column": id_column, "truncate": loaded.settings.truncate}
    resources = _collect_resources(ray, ray_cpus, ray_gpus)
    job = _Job(task, options, columns, files, form, shard_rows, max_errors, concurrency, resources)
    started = time.monotonic()
    try:
        summary = _run(loaded, model, out, job)
    except KeyboardInterrupt:
        typer.echo(_how_to_continue(out), err=True)
        raise
    except ShoalError as error:
        if not isinstance(error, ConfigError) and (out / "manifest.json").exists():
            typer.echo(_how_to_continue(out), err=True)
        raise
    _report(summary, out, time.monotonic() - started)


def _adapt_settings(loaded: LoadedConfig) -> LoadedConfig:
    """Return the settings with those that a run over files needs.

    A shard that is computed again after a kill must be the same, to the bit, whatever a model's table says.
    """
    from shoal.bulk.tasks import BATCH_MS

    changes: dict[str, Any] = {"reproducible": True}
    if loaded.sources["max_batch_ms"].layer == "default":
        changes["max_batch_ms"] = BATCH_MS
    return replace(
        loaded,
        settings=msgspec.structs.replace(loaded.settings, **changes),
        sources={**loaded.sources, "reproducible": Source("flag", "shoal bulk")},
    )


class _Job(NamedTuple):
    task: str
    options: dict[str, Any]
    columns: Columns
    files: list[Any]
    form: str
    shard_rows: int
    max_errors: int | None
    concurrency: int
    resources: Resources | None


def _collect_resources(workers: int | None, cores: float | None, gpus: float | None) -> Resources | None:
    """Return the workers on Ray; None to compute in this process."""
    if workers is None:
        if cores is not None or gpus is not None:
            name = "--ray-gpus" if cores is None else "--ray-cpus"
            raise ConfigError(f"{name} has no effect without --ray", param=name)
        return None
    from shoal.ray.bulk import Resources

    return Resources(workers, cores, gpus or 0.0)


def _collect_options(task: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the task with their defaults. Raises ConfigError for an option of another task."""
    for name, value in given.items():
        if value is not None and name not in _TASKS[task]:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect on {task}: omit it", param=f"--{name}")
    defaults: dict[str, Any] = {**_DEFAULTS, "normalize": True, "raw_scores": False, "chat": True}
    chosen = {name: given[name] if given[name] is not None else defaults.get(name) for name in _TASKS[task]}
    if task == "generate" and chosen["system"] and not chosen["chat"]:
        raise ConfigError("--system needs the chat template: omit --no-chat", param="--system")
    return chosen


def _run(loaded: LoadedConfig, model: str, out: Path, job: _Job) -> Summary:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run_models(loaded, model, out, job))


async def _run_models(loaded: LoadedConfig, model: str, out: Path, job: _Job) -> Summary:
    from shoal.bulk.plan import Recipe
    from shoal.bulk.reading import Rows
    from shoal.bulk.run import BulkRun
    from shoal.bulk.writing import open_folder
    from shoal.cli._bulk_progress import BulkProgress

    async with _open_task(loaded, model, job) as (task, facts):
        recipe = Recipe(
            task=job.task,
            model=facts,
            options=job.options,
            format=job.form,
            shard_rows=job.shard_rows,
            inputs=job.files,
        )
        with open_folder(out, recipe) as folder, BulkProgress() as progress:
            return await BulkRun(task, Rows(job.files, job.columns), folder, progress, max_errors=job.max_errors).run()


@asynccontextmanager
async def _open_task(loaded: LoadedConfig, model: str, job: _Job) -> AsyncIterator[tuple[Task, dict[str, str]]]:
    """Yield the task, and the facts of its model, which is loaded here or in workers on Ray."""
    if job.resources is not None:
        from shoal.ray import bulk as ray_bulk

        order = ray_bulk.Job(loaded, model, job.task, job.options, job.concurrency)
        async with ray_bulk.open_workers(order, job.resources) as opened:
            yield opened
        return
    from shoal.app import open_models
    from shoal.bulk.tasks import describe_model, plan_task
    from shoal.cli.progress import TerminalProgress
    from shoal.python.background import check_loaded, max_items

    async with AsyncExitStack() as stack:
        with TerminalProgress() as loading:
            running = await stack.enter_async_context(open_models(loaded, (model,), loading))
            await running.wait_until_loaded()
            check_loaded(running)
        name = running.gateway.resolve("", job.task)[0]  # type: ignore[arg-type]  # checked with the format
        task = plan_task(
            running.gateway,
            name,
            job.task,
            job.options,
            concurrency=job.concurrency,
            max_items=max_items(loaded),
        )
        yield task, describe_model(running.gateway, name)


def _how_to_continue(out: Path) -> str:
    return f"finished shards in {out} are kept: the same command continues"


def _report(summary: Summary, out: Path, seconds: float) -> None:
    kept = f", {summary.skipped_rows:,} of them kept from before" if summary.skipped_rows else ""
    typer.echo(f"{summary.rows:,} rows in {out}{kept}, {seconds:.1f} s", err=True)
    if summary.errors:
        typer.echo(f"{summary.errors:,} rows could not be used: {out / 'errors.jsonl'}", err=True)
