"""Models whose published form runs code from the model hub: Shoal builds them from the configuration. The references
are those of transformers where it has the family under another name, else torch modules of the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import shoal
from shoal.types import Array
from tests.parity import jina_v2
from tests.parity.family_models import NATIVE, shake, words_tokenizer
from tests.parity.nomic_experts import NomicExperts, Sizes
from tests.parity.reference_models import TALE
from tests.parity.test_reference import close

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

TASKS = ("retrieval.query", "text-matching")
TEXTS = ["fish swim together", "a", TALE, "where can i renew my passport"]


class Published(NamedTuple):
    """A torch model and its configuration as published. `task`: each of its matrices is stored as one that the adapter
    of this task was added to."""

    model: Any
    config: dict[str, Any]
    task: str = ""


def nomic_experts(words: int) -> Published:
    sizes = Sizes(words)
    return Published(NomicExperts(sizes), sizes.config(pad_token_id=0))


def jina(code: bool) -> Callable[[int], Published]:
    def make(words: int) -> Published:
        config = jina_v2.config(words, code=code)
        return Published(jina_v2.JinaBert(config, code=code), config)

    return make


def nomic(words: int) -> Published:
    """Version 1.5, with GPT-2's keys."""
    model = NATIVE["nomic"](words)
    sizes = model.config
    config = {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        "vocab_size": words,
        "type_vocab_size": 2,
        "n_embd": sizes.hidden_size,
        "n_head": sizes.num_attention_heads,
        "n_inner": sizes.intermediate_size,
        "n_layer": sizes.num_hidden_layers,
        "n_positions": 128,
        "activation_function": "swiglu",
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "prenorm": False,
    }
    return Published(model, config)


def gte(words: int) -> Published:
    """The "new" model with its fixed NTK scaling, which transformers has not: the frequencies are set here."""
    import torch

    model, theta, factor = NATIVE["gte"](words), 500_000, 2.0
    size = model.config.hidden_size // model.config.num_attention_heads
    steps = torch.arange(0, size, 2) / size
    model.rotary_emb.inv_freq.copy_((theta * factor) ** -steps / factor ** (2 / size))
    own = {
        "model_type": "new",
        "architectures": ["NewModel"],
        "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
        "position_embedding_type": "rope",
        "rope_theta": theta,
        "rope_scaling": {"type": "ntk", "factor": factor},
        "pack_qkv": True,
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
    }
    return Published(model, {k: v for k, v in model.config.to_dict().items() if k != "rope_parameters"} | own)


def jina_v3(words: int) -> Published:
    model = NATIVE["jina-v3"](words)
    own = {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaModel"],
        "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
        "position_embedding_type": "rotary",
        "rotary_emb_base": 20_000.0,
        "emb_pooler": "mean",
        "lora_adaptations": [*TASKS],
        "lora_rank": 4,
        "lora_alpha": 2,
    }
    config = {k: v for k, v in model.config.to_dict().items() if k != "rope_parameters"} | own
    return Published(model, config, task=TASKS[1])


MODELS: dict[str, Callable[[int], Published]] = {
    "nomic": nomic,
    "nomic with experts": nomic_experts,
    "gte": gte,
    "jina 2": jina(False),
    "jina 2 for code": jina(True),
    "jina 3": jina_v3,
}


def save(published: Published, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    if hasattr(published.model, "save_pretrained"):  # under the published names
        published.model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
    else:
        tensors = {name: tensor.contiguous() for name, tensor in published.model.state_dict().items()}
    if published.task:
        tensors = without_task(tensors)
        arguments = {"max_seq_length": 64, "model_args": {"default_task": published.task}}
        (folder / "sentence_bert_config.json").write_text(json.dumps(arguments))
        module = {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer", "kwargs": ["task"]}
        pooling = module | {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling", "kwargs": None}
        (folder / "modules.json").write_text(json.dumps([module, pooling]))
        (folder / "1_Pooling").mkdir()
        modes = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(published.config, default=str))


def without_task(tensors: dict[str, Any]) -> dict[str, Any]:
    """Take an adapter, of rank 4 and times 2 / 4, out of every matrix; store both as torch does."""
    import torch

    stored = {}
    for name, tensor in tensors.items():
        place = f"roberta.{name}"
        if tensor.ndim == 1:
            stored[place] = tensor
            continue
        place = place.replace(".weight", ".parametrizations.weight.")
        tall, wide = torch.randn(2, tensor.shape[0], 4) * 0.2, torch.randn(2, 4, tensor.shape[1]) * 0.2
        stored[f"{place}original"] = tensor - 0.5 * tall[1] @ wide[1]
        first, second = (tall, wide) if "embeddings" in name else (wide, tall)
        stored |= {f"{place}0.lora_A": first, f"{place}0.lora_B": second}
    return stored


def expected(published: Published, folder: Path, texts: list[str] = TEXTS, longest: int = 128) -> Array:
    """Mean pooling, one text at a time."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in texts:
        read = tokenizer(text, return_tensors="pt", truncation=True, max_length=longest)
        with torch.no_grad():
            found = published.model.eval()(input_ids=read["input_ids"], attention_mask=read["attention_mask"])
        rows.append(getattr(found, "last_hidden_state", found)[0].mean(0).numpy())
    return unit(np.stack(rows))


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_every_task_of_jina_3(tmp_path: Path, engine: Any) -> None:
    """Requested by name or role: the prompt, and the weights with the task's adapter added; without one, the default's.
    A text of another task is another vector. Texts beyond the maximum length are cut."""
    import torch

    torch.manual_seed(3)
    folder = tmp_path / "model"
    published = jina_v3(words_tokenizer(folder))
    shake(published.model)
    save(published, folder)
    prompts = {TASKS[0]: "find the fish ", TASKS[1]: ""}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    texts = [*TEXTS, " ".join(TEXTS * 9)]
    wanted = {task: of_task(published, folder, place, prompts[task], texts) for place, task in enumerate(TASKS)}
    settings: dict[str, Any] = {"home": str(tmp_path / "home"), "offline": True, "threads": 1, "precision": "f32"}
    with shoal.open(f"file:{folder}", engine=engine, truncate=True, **settings) as model:
        for name in (None, *TASKS):
            close(unit(np.asarray(model.embed(texts, prompt_name=name))), wanted[name or TASKS[1]])
        close(unit(np.asarray(model.embed(texts, input_type="query"))), wanted[TASKS[0]])
    assert np.abs(wanted[TASKS[0]] - wanted[TASKS[1]]).max() > 0.05


def of_task(published: Published, folder: Path, place: int, prompt: str, texts: list[str]) -> Array:
    """Return the vectors of the model with the adapter of the task at this place, as its own code adds it: to the
    original matrix, B A times alpha / rank, A B for a table of embeddings."""
    from safetensors.torch import load_file, save_file

    stored = {name.removeprefix("roberta."): each for name, each in load_file(folder / "model.safetensors").items()}
    weights = {name: each for name, each in stored.items() if ".parametrizations." not in name}
    for name, original in stored.items():
        stem, found, _ = name.partition(".parametrizations.weight.original")
        if found:
            first, second = (stored[f"{stem}.parametrizations.weight.0.lora_{part}"][place] for part in "AB")
            weights[f"{stem}.weight"] = original + 0.5 * (first @ second if "embeddings" in stem else second @ first)
    plain = folder.parent / f"task-{place}"
    published.model.config.save_pretrained(plain)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    model = type(published.model).from_pretrained(plain)
    return expected(published._replace(model=model), folder, [prompt + text for text in texts], 64)


def unit(rows: Array) -> Array:
    scaled: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return scaled


@pytest.mark.parametrize("name", MODELS)
def test_vectors_equal_those_of_the_reference(tmp_path: Path, name: str) -> None:
    import torch

    torch.manual_seed(3)
    folder = tmp_path / "model"
    published = MODELS[name](words_tokenizer(folder))
    shake(published.model)
    save(published, folder)
    settings: dict[str, Any] = {"home": str(tmp_path / "home"), "offline": True, "threads": 1, "precision": "f32"}
    with shoal.open(f"file:{folder}", **settings) as model:
        close(unit(np.asarray(model.embed(TEXTS))), expected(published, folder))
