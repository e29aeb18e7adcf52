"""Models that run elsewhere: their tokenizer and settings without their weights."""

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
from shoal.models.convert import reference
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
    made = checkpoints.checkpoint(tmp_path / "tiny")
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": "query"}
    checkpoints.write_json(made / "config_sentence_transformers.json", prompts)
    (made / "model.safetensors").unlink()
    return made


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    made = tmp_path / "bare"
    made.mkdir()
    checkpoints.tokenizer("roberta").save(str(made / "tokenizer.json"))
    return made


def spec_of(folder: Path, store: Store, **fields: Any) -> ForeignModel:
    options: dict[str, Any] = {"inputs": INPUTS, "outputs": TOKENS, "access": OFFLINE}
    return foreign_spec(str(folder), store=store, **(options | fields))


class TestWholeModels:
    def test_everything_is_read_as_for_a_local_model(self, folder: Path, store: Store) -> None:
        """Pooling, limits, prompts and normalising come from the files; token vectors are pooled here."""
        found = spec_of(folder, store, dimension=checkpoints.HIDDEN)
        assert found.notes == ()
        assert found.spec == TextSpec(
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
        tokenizer = Tokenizer.from_file(str(found.folder / "tokenizer.json"))
        assert tokenizer.encode("fish").tokens[:3] == ["[CLS]", "fish", "[SEP]"]

    @pytest.mark.parametrize(
        ("outputs", "pooled"),
        [(SENTENCE, "sentence_embedding"), (("sentence_embedding", "pooled"), "pooled"), (TOKENS, "token_embeddings")],
    )
    def test_the_output_that_is_read(self, folder: Path, store: Store, outputs: tuple[str, ...], pooled: str) -> None:
        """What the served graph gives decides, the rows before a final Normalize being preferred."""
        assert spec_of(folder, store, outputs=outputs).spec.pooled == pooled

    def test_overrides_win(self, folder: Path, store: Store) -> None:
        """What the operator says stands in place of what the files say."""
        overrides = Overrides(
            pooling="cls+mean", max_tokens=7, prompts={"q": "Q: "}, default_prompt_name="q", normalize=False
        )
        spec = spec_of(folder, store, overrides=overrides, dimension=checkpoints.HIDDEN).spec
        assert (spec.pooling, spec.dimension, spec.max_tokens) == ("cls+mean", 2 * checkpoints.HIDDEN, 7)
        assert (spec.prompts, spec.default_prompt_name) == ({"q": "Q: "}, "q")
        assert (spec.modules, spec.ends_normalized) == ((), False)

    def test_a_default_prompt_goes_with_the_prompts_that_held_it(self, folder: Path, store: Store) -> None:
        """Prompts of the operator's without the model's default leave none."""
        spec = spec_of(folder, store, overrides=Overrides(prompts={"q": "Q: "})).spec
        assert spec.default_prompt_name is None

    def test_a_normalize_can_be_added(self, tmp_path: Path, store: Store) -> None:
        """A model without one ends in it when the operator says so."""
        made = checkpoints.checkpoint(tmp_path / "raw", after=())
        assert not spec_of(made, store).spec.ends_normalized
        assert spec_of(made, store, overrides=Overrides(normalize=True)).spec.modules == ("normalize",)

    def test_unknown_architectures_are_welcome(self, folder: Path, store: Store) -> None:
        """They run elsewhere; the same folder is refused where Shoal must build the graph."""
        config = {"model_type": "novel", "auto_map": {"AutoModel": "code.py"}, "pad_token_id": 3, "hidden_size": 16}
        checkpoints.write_json(folder / "config.json", config)
        spec = spec_of(folder, store).spec
        assert (spec.pad_id, spec.max_tokens, spec.dimension) == (3, 32, 16)

    def test_dense_modules_need_a_graph_that_holds_them(self, tmp_path: Path, store: Store) -> None:
        """Their weights are not fetched; behind a sentence embedding they are the server's."""
        made = checkpoints.checkpoint(tmp_path / "dense", after=("Dense",))
        checkpoints.dense(made, "2_Dense", checkpoints.HIDDEN, 4)
        with pytest.raises(ModelFileError, match="a Dense follows the pooling"):
            spec_of(made, store)
        spec = spec_of(made, store, outputs=SENTENCE, dimension=4).spec
        assert (spec.dimension, spec.modules) == (4, ("dense:tanh",))

    def test_another_models_tokenizer_is_noticed(self, folder: Path, store: Store) -> None:
        """The dimensions of the files and of the server must agree."""
        for outputs in (TOKENS, SENTENCE):
            with pytest.raises(ConfigError, match="with 16 dimensions, but the served model returns 384"):
                spec_of(folder, store, outputs=outputs, dimension=384)

    def test_positions_that_do_not_begin_at_zero_are_refused(self, tmp_path: Path, store: Store) -> None:
        """RoBERTa counts from its padding on; a graph that asks for positions would get others."""
        made = checkpoints.checkpoint(tmp_path / "roberta", "roberta")
        with pytest.raises(ModelFileError, match=r"config\.json: model_type: positions .* at 2"):
            spec_of(made, store, inputs=(*INPUTS, "position_ids"))

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [(Overrides(pooling="median"), "median"), (Overrides(default_prompt_name="nope"), "it has query, passage")],
    )
    def test_overrides_that_cannot_work(self, folder: Path, store: Store, overrides: Overrides, message: str) -> None:
        """The setting and what is possible are named."""
        with pytest.raises(ConfigError, match=message):
            spec_of(folder, store, overrides=overrides)

    def test_files_that_change_the_vectors_are_refused_by_key(self, folder: Path, store: Store) -> None:
        """As for a local model."""
        checkpoints.write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "median"})
        with pytest.raises(ModelFileError, match=r"1_Pooling/config\.json: "):
            spec_of(folder, store)


class TestBareTokenizers:
    def test_missing_values_are_assumed_and_reported(self, bare: Path, store: Store) -> None:
        """Mean pooling and 512 tokens; the padding id is the tokenizer's own."""
        found = spec_of(bare, store, dimension=8)
        assert [note.rpartition("set ")[2] for note in found.notes] == ["`pooling`", "`max_tokens`"]
        assert (found.spec.pooling, found.spec.max_tokens, found.spec.dimension) == ("mean", 512, 8)
        assert found.spec.pad_id == checkpoints.vocabulary("roberta")["<pad>"] == 1

    def test_nothing_is_assumed_if_all_is_stated(self, bare: Path, store: Store) -> None:
        """No notes then."""
        found = spec_of(bare, store, overrides=Overrides(pooling="lasttoken", max_tokens=77))
        assert found.notes == ()
        assert (found.spec.pooling, found.spec.max_tokens) == ("lasttoken", 77)

    def test_a_tokenizer_config_helps(self, bare: Path, store: Store) -> None:
        """It states the length and names the padding token."""
        checkpoints.write_json(bare / "tokenizer_config.json", {"model_max_length": 48, "pad_token": "<unk>"})
        found = spec_of(bare, store, outputs=SENTENCE)
        assert found.notes == ()
        assert (found.spec.max_tokens, found.spec.pad_id) == (48, 3)

    def test_a_folder_with_nothing_is_refused(self, tmp_path: Path, store: Store) -> None:
        """With what should be there."""
        (tmp_path / "empty").mkdir()
        with pytest.raises(SourceError, match=r"tokenizer\.json"):
            spec_of(tmp_path / "empty", store)

    def test_a_broken_tokenizer_leaves_nothing_behind(self, bare: Path, store: Store) -> None:
        """Once it is mended it works."""
        good = (bare / "tokenizer.json").read_bytes()
        (bare / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
            spec_of(bare, store)
        assert not [path for path in (store.home / "tokenizers").rglob("*") if path.is_file()]
        (bare / "tokenizer.json").write_bytes(good)
        assert spec_of(bare, store).spec.max_tokens == 512


class TestFetching:
    def test_the_hub_is_requested_once_and_never_for_weights(self, folder: Path, hub: Hub, store: Store) -> None:
        """The second time nothing is asked, even with the hub away."""
        hub.files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in _files(folder)}
        hub.files |= {"model.safetensors": b"weights", "onnx/model.onnx": b"graph"}
        first = foreign_spec("org/tiny", store=store, inputs=INPUTS, outputs=TOKENS, access=Access(hub=hub.url))
        assert any(path.endswith("/1_Pooling/config.json") for path in hub.paths)
        assert not any("model." in path.rpartition("/")[2] for path in hub.paths)
        again = foreign_spec("org/tiny", store=store, inputs=INPUTS, outputs=TOKENS, access=OFFLINE)
        assert again == first

    def test_a_wheel_gives_its_settings(self, folder: Path, make_wheel: MakeWheel, index: Access, store: Store) -> None:
        """Its weights stay in it."""
        files = {
            f"tiny_model/model/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in _files(folder)
        }
        make_wheel(files | {"tiny_model/model/model.safetensors": b"weights"})
        found = foreign_spec("pypi:tiny-model", store=store, inputs=INPUTS, outputs=TOKENS, access=index)
        assert found.spec.max_tokens == 32
        assert not list(found.folder.rglob("*.safetensors"))

    def test_a_folder_is_read_again_when_it_changes(self, folder: Path, store: Store) -> None:
        """And what was made of its older state goes."""
        before = spec_of(folder, store)
        checkpoints.write_json(folder / "sentence_bert_config.json", {"max_seq_length": 9})
        after = spec_of(folder, store)
        assert (before.spec.max_tokens, after.spec.max_tokens) == (32, 9)
        assert [path.name for path in after.folder.parent.iterdir()] == [after.folder.name]

    def test_a_model_that_was_pulled_needs_no_network(
        self, hub: Hub, store: Store, conversions: list[Path], bare: Path
    ) -> None:
        """Its source lies in the store."""
        hub.files["tokenizer.json"] = (bare / "tokenizer.json").read_bytes()
        hub.files["1_Pooling/config.json"] = json.dumps(checkpoints.MEAN).encode()
        prepare(parse_address("org/tiny"), store=store, access=Access(hub=hub.url))
        before = len(hub.paths)
        found = tokenizer_folder("org/tiny", store=store, access=OFFLINE)
        assert (found / "tokenizer.json").is_file()
        assert len(hub.paths) == before

    def test_pinned_weights_are_not_missed(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_files: dict[str, bytes]
    ) -> None:
        """The default model's settings come without them; what is pinned of the settings still counts."""
        address = parse_address("org/tiny")
        pin = Pin((address,), frozenset(model_files), {"hf": {"model.safetensors": "0" * 64}})
        monkeypatch.setitem(pins._PINS, "hf:org/tiny", pin)
        fetch(address, tmp_path / "into", access=Access(hub=hub.url), weights=False)
        assert not (tmp_path / "into" / "model.safetensors").exists()
        pin.hashes["hf"]["tokenizer.json"] = "0" * 64
        with pytest.raises(SourceError, match=r"tokenizer\.json does not have the content"):
            fetch(address, tmp_path / "into", access=Access(hub=hub.url), weights=False)

    def test_missing_tokenizers_are_errors(self, store: Store, tmp_path: Path) -> None:
        """A source that cannot be fetched, and one that is none."""
        with pytest.raises(SourceError, match="offline"):
            tokenizer_folder("org/tiny", store=store, access=OFFLINE)
        with pytest.raises(SourceError, match="does not exist"):
            tokenizer_folder(str(tmp_path / "nowhere"), store=store)
        with pytest.raises(AddressError, match="another server"):
            tokenizer_folder("triton://host#model", store=store)

    def test_sources_of_one_name_do_not_meet(self, folder: Path, bare: Path, tmp_path: Path, store: Store) -> None:
        """Two folders called alike are two sources."""
        other = tmp_path / "elsewhere" / folder.name
        shutil.copytree(bare, other)
        assert spec_of(folder, store).spec.max_tokens == 32
        assert spec_of(other, store).spec.max_tokens == 512
        assert spec_of(folder, store).spec.max_tokens == 32


class TestParameters:
    def test_a_spec_comes_back_from_a_configuration(self, folder: Path, store: Store) -> None:
        """As the repository writer leaves it: JSON."""
        spec = spec_of(folder, store).spec
        assert spec_from_parameters(msgspec.json.encode(spec).decode()) == spec

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"tokenizer": 3}', '{"tokenizer": "t"}'])
    def test_what_is_no_spec_is_refused(self, text: str) -> None:
        """With the file and the key."""
        with pytest.raises(ModelFileError, match=r"config\.pbtxt: shoal_text: is not readable .* load the model"):
            spec_from_parameters(text)


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("mode", ["mean", "cls", "max", "weightedmean", "lasttoken", "mean_sqrt_len_tokens"])
def test_vectors_are_those_of_the_whole_model(tmp_path: Path, store: Store, mode: str, include_prompt: bool) -> None:
    """A server that runs the encoder alone, with pooling here: the vectors of the reference, prompts and padding and
    all."""
    pooling = {"word_embedding_dimension": checkpoints.HIDDEN, "pooling_mode": mode, "include_prompt": include_prompt}
    made = checkpoints.checkpoint(tmp_path / "model", pooling=pooling)
    checkpoints.write_json(made / "config_sentence_transformers.json", {"prompts": {"query": "to: "}})
    found = spec_of(made, store, dimension=checkpoints.HIDDEN)
    pipeline = TextPipeline(found.folder, found.spec, truncate=True)
    task = Embed(model="m", inputs=[], prompt_name="query")
    batch = [
        one for one in pipeline.prepare([(task, text) for text in ("fish", "go together")]) if isinstance(one, Prepared)
    ]
    inputs = pipeline.collate(batch, EngineFacts(name="e", inputs=INPUTS, outputs=TOKENS))
    texts = [one.tensors["input_ids"] for one in batch]
    contract = read_contract(made)
    assert contract.encoder is not None
    tokens = np.full((*inputs["input_ids"].shape, checkpoints.HIDDEN), np.nan, dtype=np.float32)
    for row, rows in enumerate(reference._encode(open_weights(made, ""), contract.encoder, texts)):
        tokens[row, : len(rows)] = rows
    skip = 0 if include_prompt else len(("[CLS]", "to", ":"))
    expected = reference.embed(made, contract, contract.encoder, texts, [skip, skip]).sentence
    vectors = [row for row in pipeline.finish({"token_embeddings": tokens}, batch) if isinstance(row, np.ndarray)]
    np.testing.assert_allclose(np.stack(vectors), expected, rtol=1e-5, atol=1e-6)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
