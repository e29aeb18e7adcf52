"""Renders `docs/settings.md` from the tables of settings and presets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.config.presets import PRESETS, Preset
from shoal.config.schema import Setting
from shoal.config.settings import BY_NAME, MODEL_KEYS, SETTINGS


def render_reference() -> str:
    """Render `docs/settings.md`."""
    sections = dict.fromkeys(setting.section for setting in SETTINGS)
    parts = [_INTRODUCTION]
    for section in sections:
        rows = [setting for setting in SETTINGS if setting.section == section]
        parts.append(f"## {section}\n\n" + _setting_rows(rows))
    parts.append(_MODELS_SECTION.format(rows=_model_rows()))
    parts.append(_PRESETS_SECTION)
    parts += [_preset_page(one) for one in PRESETS.values()]
    return "\n\n".join(parts) + "\n"


def _setting_rows(rows: Sequence[Setting]) -> str:
    lines = ["| setting | flag, environment | default | |", "|---|---|---|---|"]
    for row in rows:
        must = "" if row.wording == "text" else f" Must be {row.wording}."
        lines.append(f"| `{row.name}` | `{row.flag}` `{row.env}` | {_format_default(row)} | {row.help}{must} |")
    return "\n".join(lines)


def _format_default(row: Setting) -> str:
    if row.default is None or row.default in ((), ""):
        return "none"
    return f"`{str(row.default).lower() if isinstance(row.default, bool) else row.default}`"


def _model_rows() -> str:
    own = [f"| `{row.name}` | {row.help} |" for row in MODEL_KEYS.values() if not row.per_model]
    shared = ", ".join(f"`{row.name}`" for row in MODEL_KEYS.values() if row.per_model)
    return "\n".join(["| key | |", "|---|---|", *own, f"| {shared} | As above, for this model. |"])


def _preset_page(one: Preset) -> str:
    defaults = ", ".join(
        f"`{name}` {_format_default(replace(BY_NAME[name], default=to))}" for name, to in one.defaults.items()
    )
    lines = [f"### {one.name}", "", f"{one.product}. Its defaults: {defaults}."]
    for kind, names in (("environment", one.variables), ("flag", one.flags)):
        rows = [f"| `{name}` | {means} |" for name, means in names.items()]
        lines += ["", f"| {kind} | sets |", "|---|---|", *rows] if rows else []
    return "\n".join(lines)


_INTRODUCTION = """\
# Settings

Generated from `src/shoal/config/settings.py` by `python -m shoal.config`; edit it there.

Each setting has one name: `max_batch_size` in `shoal.toml`, `--max-batch-size` on the command line and
`SHOAL_MAX_BATCH_SIZE` in the environment. Flags override the environment, the environment overrides the file, and the
file overrides the default. The file is the one named by `--config` or `SHOAL_CONFIG`, else `shoal.toml` in the current
folder. Write a list as a repeated flag on the command line, with commas in the environment and as `["a", "b"]` in the
file. Turn a switch off with `--no-...`. An empty variable counts as not set. `shoal config` shows the effective values
and their sources."""

_MODELS_SECTION = """\
## Models

Shoal serves the models given as arguments (`shoal serve ADDRESS ...`), else those in `SHOAL_MODELS` (separated by
spaces), else the tables of the file that have `backends`, else the default model (none with `--no-default-model`). A
table also applies to a model of its name given as an argument; flags and the environment override it.

```toml
[models."small"]
backends = ["hf:sentence-transformers/all-MiniLM-L6-v2"]
aliases = ["text-embedding-3-small"]
default_for = ["embed"]
max_batch_size = 32

[models."retriever"]
backends = ["triton://triton.example:8001#retriever"]
tokenizer = "hf:intfloat/e5-small-v2"
pooling = "mean"
prompts = {{query = "query: ", document = "passage: "}}
input_names = {{input_ids = "ids", attention_mask = "mask"}}
```

{rows}"""

_PRESETS_SECTION = """\
## Presets

`shoal serve --as NAME` (or `SHOAL_AS`, or `as = "NAME"` in the file) replaces another server: Shoal uses its port, its
environment variables and its flags, so that the same command line starts Shoal. Precedence, highest first: flags,
including the other server's; Shoal's own variables; the other server's variables; the file; the preset's defaults. The
other server's names are read only under its preset. `shoal config --as NAME` shows the resulting settings.

The originals (except Ollama) listen on every address and require no key. For the same in Shoal, use
`--host 0.0.0.0 --insecure`, or with a key `--host 0.0.0.0 --api-key-file FILE`."""
