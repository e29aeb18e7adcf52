"""Language models that are published as rerankers: which are known, how others are named, and how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.backends import parse_address, parse_served
from shoal.errors import AddressError, ModelFileError, SourceError
from shoal.models.address import Address
from shoal.models.convert.contract import read_contract
from shoal.models.convert.contract.published_reranker import read_form
from shoal.models.explain import explain
from shoal.models.prepare import prepare
from shoal.models.progress import Progress, Stop
from shoal.models.rerankers import FORMS, MARK, mark_folder, recognize_folder, recognize_name
from shoal.models.sources import Access, fetch
from shoal.models.sources.access import FetchJob
from shoal.models.sources.select import IR, choose_files
from shoal.models.store import Store
from tests.unit.models.checkpoints import write_json
from tests.unit.models.conftest import Hub, MakeWheel, Recorder
from tests.unit.models.scoring_checkpoints import answering_checkpoint

STEMS = {"qwen3": "Qwen3", "bge": "Gemma", "mxbai": "Qwen2"}
FAMILIES = {"qwen3": "qwen3", "bge": "gemma", "mxbai": "qwen2"}
PUBLISHED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def published(folder: Path, form: str = "qwen3", **changes: Any) -> Path:
    """Write a tiny language model with the files of a published reranker."""
    options = {"max_position_embeddings": 512} | changes
    answering_checkpoint(folder, FAMILIES[form], stem=STEMS[form], template=None, **options)
    for name in ("modules.json", "1_LogitScore/config.json", "config_sentence_transformers.json"):
        (folder / name).unlink()
    (folder / "sentence_bert_config.json").unlink()
    write_json(folder / "tokenizer_config.json", {"bos_token": "[CLS]"})
    write_json(folder / "generation_config.json", {})
    return folder


def test_published_names_are_known() -> None:
    assert recognize_name("Qwen/Qwen3-Reranker-0.6B") == "qwen3"
    assert recognize_name("BAAI/bge-reranker-v2-gemma") == "bge"
    assert recognize_name("mixedbread-ai/mxbai-rerank-large-v2") == "mxbai"
    assert recognize_name("Qwen/Qwen3-0.6B") == recognize_name("me/Qwen3-Reranker-0.6B") == ""


@pytest.mark.parametrize(
    ("name", "config", "form"),
    [
        ("Qwen3-Reranker-4B", {}, "qwen3"),
        ("any", {"_name_or_path": "Qwen/Qwen3-Reranker-8B"}, "qwen3"),
        ("any", {"_name_or_path": "Qwen/Qwen3-0.6B"}, ""),
        ("Qwen3-Reranker-4B", {"architectures": ["Qwen3ForSequenceClassification"]}, ""),
        ("Qwen3-Reranker-4B", {"architectures": []}, ""),
        ("Qwen3-Reranker-4B", {"architectures": 5}, ""),
        ("my-reranker", {}, ""),
    ],
)
def test_a_folder_is_known_by_its_name_and_architecture(
    tmp_path: Path, name: str, config: dict[str, Any], form: str
) -> None:
    write_json(tmp_path / "config.json", {"architectures": ["Qwen3ForCausalLM"]} | config)
    assert recognize_folder(tmp_path, name) == form


def test_a_config_that_is_nested_too_deeply_is_no_reranker(tmp_path: Path) -> None:
    """The loader reports it."""
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    assert recognize_folder(tmp_path, "Qwen3-Reranker-4B") == ""


GRAPHS = {
    "ir": dict.fromkeys(IR, b"graph"),
    "gguf": {"model.gguf": b"GGUF"},
    "onnx": {"onnx/model.onnx": b"graph"},
}
SETTINGS = {
    "config.json": b'{"architectures": ["Qwen3ForCausalLM"], "_name_or_path": "Qwen/Qwen3-Reranker-8B"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
}


@pytest.fixture(params=GRAPHS)
def graphs(request: pytest.FixtureRequest) -> dict[str, bytes]:
    """The files of a published reranker that someone exported, without its weights."""
    return SETTINGS | GRAPHS[request.param]


def test_a_folder_of_graphs_alone_is_no_reranker(graphs: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-Reranker-4B"
    for name, content in graphs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    fetched = fetch(parse_address(f"file:{folder}"), tmp_path / "into")
    assert fetched.folder == folder and not (tmp_path / "into").exists()


def test_a_repository_of_graphs_alone_is_no_reranker(graphs: dict[str, bytes], hub: Hub, tmp_path: Path) -> None:
    hub.files = graphs | {"pytorch_model.bin.index.json": b"{}"}
    fetch(parse_address("org/tiny"), tmp_path / "into", access=Access(hub=hub.url))
    assert {path.relative_to(tmp_path / "into").as_posix() for path in files(tmp_path / "into")} == set(graphs)


def test_a_known_repository_of_graphs_alone_is_no_reranker(graphs: dict[str, bytes]) -> None:
    address = parse_address("Qwen/Qwen3-Reranker-8B")
    job = FetchJob(address, Path("into"), Access(), Progress(), Stop())
    assert job.find_reranker(graphs) == ""
    assert job.choose(graphs, []) == sorted(graphs)
    assert job.find_reranker([*graphs, "model-00001-of-00002.safetensors"]) == "qwen3"
    assert job.find_reranker([*graphs, "pytorch_model.bin"]) == "qwen3"
    assert job.find_reranker([*graphs, "original/pytorch_model.bin"]) == ""


def test_a_wheel_of_graphs_alone_is_no_reranker(
    graphs: dict[str, bytes], make_wheel: MakeWheel, index: Access, tmp_path: Path
) -> None:
    make_wheel({f"tiny_model/{name}": content for name, content in graphs.items()})
    fetch(parse_address("pypi:tiny-model"), tmp_path / "into", access=index)
    assert {path.relative_to(tmp_path / "into").as_posix() for path in files(tmp_path / "into")} == set(graphs)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_form_of_an_address_takes_the_place_of_a_mark(tmp_path: Path) -> None:
    """In the copy alone: the files there are links to the folder's own."""
    folder = published(tmp_path / "mine")
    mark_folder(folder, "mxbai")
    theirs = (folder / MARK).read_bytes()
    fetched = fetch(parse_address(f"file:{folder}#reranker=qwen3"), tmp_path / "into")
    assert read_form(fetched.folder) == "qwen3"
    assert (folder / MARK).read_bytes() == theirs
    assert fetch(parse_address(f"file:{folder}"), tmp_path / "into").folder == folder


def test_an_address_may_name_the_form() -> None:
    for text in ("hf:me/tuned@main#reranker=bge", "pypi:tuned==1#reranker=bge", "file:/a#b#reranker=bge"):
        address = parse_address(text)
        assert (address.reranker, str(address)) == ("bge", text)
        assert "reranker" not in address.id
    served = parse_served("me/tuned#reranker=qwen3")
    assert (served.name, served.name_only) == ("me/tuned", "")
    assert parse_served("mine=me/tuned#reranker=qwen3").addresses == served.addresses
    with pytest.raises(AddressError, match="write #reranker=qwen3 or bge or mxbai"):
        parse_address("hf:me/tuned#reranker=yes")
    with pytest.raises(AddressError, match="a GGUF file is never read as a reranker: omit ':q8_0', or #reranker=bge"):
        parse_address("hf:me/tuned:q8_0#reranker=bge")


def test_a_language_model_is_refused_with_the_option() -> None:
    """And never taken for a reranker."""
    with pytest.raises(SourceError, match=r"belongs to a language model.*#reranker=qwen3 or #reranker=bge"):
        choose_files(PUBLISHED)
    assert choose_files(PUBLISHED, reranker=True) == sorted(PUBLISHED)
    assert choose_files([*PUBLISHED, MARK]) == sorted([*PUBLISHED, MARK])


@pytest.mark.parametrize("form", FORMS)
def test_a_marked_folder_is_read_as_its_card_says(tmp_path: Path, form: str) -> None:
    folder = published(tmp_path, form)
    mark_folder(folder, form)
    contract = read_contract(folder)
    head = contract.classifier
    assert head is not None and head.answers is not None and head.spec.template is not None
    assert len(head.answers.ids) == (1 if form == "bge" else 2)
    assert (head.pooling, head.out, head.spec.activation) == ("lasttoken", "lm_head", "sigmoid")
    assert contract.max_tokens == 512
    assert bool(head.spec.template.apart) == (form != "qwen3") == (head.spec.template.max_query is not None)


def test_long_models_are_read_to_the_length_of_the_card(tmp_path: Path) -> None:
    folder = published(tmp_path, max_position_embeddings=40_960)
    mark_folder(folder, "qwen3")
    contract = read_contract(folder)
    assert (contract.max_tokens, contract.max_tokens_at) == (8192, (MARK, "form"))
    assert contract.encoder is not None and contract.encoder.max_positions == 8192


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "other"}, rf"^{MARK}: form: must be one of qwen3, bge, mxbai"),
        ({"form": "mxbai"}, r"^config.json: architectures: must be Qwen2ForCausalLM for #reranker=mxbai"),
    ],
)
def test_a_form_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, str], message: str) -> None:
    write_json(published(tmp_path) / MARK, change)
    with pytest.raises(ModelFileError, match=message):
        read_contract(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", "{}", r"tokenizer_config.json: bos_token: is missing"),
        ("tokenizer.json", "{}", r"tokenizer.json: the tokenizer cannot be read"),
        ("tokenizer.json", None, r"tokenizer.json: is missing"),
        ("config.json", None, r"config.json: is missing"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    folder = published(tmp_path, "bge")
    mark_folder(folder, "bge")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(ModelFileError, match=message):
        read_contract(folder)


def test_a_folder_is_prepared_without_a_change_to_it(tmp_path: Path) -> None:
    """The mark is in the store; the same folder without the form is still a language model."""
    folder, store = published(tmp_path / "mine"), Store(str(tmp_path / "home"))
    before = sorted(path.name for path in folder.iterdir())
    address = parse_address(f"file:{folder}#reranker=qwen3")
    stored = prepare(address, store=store)
    assert prepare(address, store=store) == stored
    spec = stored.manifest.text_spec
    assert spec.score is not None and spec.score.template is not None and spec.tasks == ("rerank", "classify")
    assert sorted(path.name for path in folder.iterdir()) == before
    assert explain(stored).max_length.startswith("512 tokens")
    with pytest.raises(SourceError, match="add its form to the address"):
        prepare(Address(scheme="file", target=str(folder)), store=store)


def test_modules_come_before_a_name(tmp_path: Path) -> None:
    """A newer revision, saved by sentence-transformers, is read as it says."""
    folder = answering_checkpoint(tmp_path / "Qwen3-Reranker-0.6B")
    stored = prepare(parse_address(f"file:{folder}"), store=Store(str(tmp_path / "home")))
    score = stored.manifest.text_spec.score
    assert score is not None and score.template is not None and score.template.file == "chat_template.jinja"


def test_a_reranker_that_is_served_as_a_language_model_is_noted(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.models import prepare as preparing

    folder = tmp_path / "My-Reranker-GGUF"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF")

    def fail(*_: Any, **__: Any) -> None:
        raise ModelFileError("read no further", file="model.gguf")

    monkeypatch.setattr(preparing, "prepare_generative", fail)
    with pytest.raises(ModelFileError, match="read no further"):
        prepare(parse_address(f"file:{folder}"), store=Store(str(tmp_path / "home")), progress=recorder)
    assert any("looks like a reranker" in note and "#reranker=qwen3" in note for note in recorder.lines)
