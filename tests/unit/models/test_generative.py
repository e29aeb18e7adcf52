"""Language models, from their files to the store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shoal.backends import parse_address
from shoal.errors import ModelFileError, SourceError
from shoal.models.address import Address
from shoal.models.generative import check_ir, is_causal, prepare_generative
from shoal.models.gguf import read_gguf
from shoal.models.manifest import GenerationSpec, check_files, read_manifest
from shoal.models.prepare import prepare
from shoal.models.remote_text_models import tokenizer_folder
from shoal.models.sources import Access
from shoal.models.sources.folder import resolve
from shoal.models.sources.select import choose_files, find_generative_graph
from shoal.models.store import Store, StoredModel
from tests.fixtures import tiny_gguf

if TYPE_CHECKING:
    from tests.unit.models.conftest import Hub

FIXTURES = Path(__file__).parents[2] / "fixtures"
IR = FIXTURES / "tiny_llama_ir"
GGUF = FIXTURES / "tiny_llama.gguf"
GRAPH = ["openvino_model.bin", "openvino_model.xml"]
SETTINGS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
TINY = parse_address("org/tiny")


@pytest.fixture
def ir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(IR, tmp_path / "model"))


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    folder = tmp_path / "one"
    folder.mkdir()
    shutil.copyfile(GGUF, folder / "tiny-q8_0.gguf")
    return folder


@pytest.fixture
def on_hub(hub: Hub) -> Hub:
    """The tiny Llama as a repository with extra files that must not be fetched."""
    hub.files = {path.name: path.read_bytes() for path in IR.iterdir()}
    hub.files |= {
        "pytorch_model.bin": b"pickle",
        "README.md": b"#",
        "modeling.py": b"",
        "chat_template.jinja": b"{{1}}",
    }
    hub.lfs = frozenset(GRAPH[:1])
    return hub


def stored(store: Store, folder: Path) -> StoredModel:
    return prepare(parse_address(f"file:{folder}"), store=store, engine=never)


def split_tiny(folder: Path) -> list[str]:
    """Write a tiny Llama in three parts, and return their names."""
    model = tiny_gguf.model("llama")
    model.metadata |= {key: value for key, value in read_gguf(GGUF).metadata.items() if key.startswith("tokenizer.")}
    return [path.name for path in model.write_parts(folder, "tiny-q8_0", 3)]


def never(graph: Path) -> Any:
    raise AssertionError("language models are not compared with a second path")


class TestChoice:
    def test_an_openvino_repository(self) -> None:
        """The graph, its tokenizer graphs and all settings are fetched, but no pickle, although it has the suffix of
        graph weights."""
        names = [*GRAPH, *SETTINGS, "chat_template.jinja", "special_tokens_map.json", "openvino_tokenizer.xml"]
        names += ["openvino_tokenizer.bin", "openvino_detokenizer.xml", "openvino_detokenizer.bin", "vocab.json"]
        names += ["additional_chat_templates/tool_use.jinja"]
        unwanted = ["pytorch_model.bin", "openvino_model.bin.py", "openvino_other.bin", "README.md", ".gitattributes"]
        assert choose_files([*names, *unwanted]) == sorted(names)

    def test_one_gguf(self) -> None:
        """Files next to it are fetched too, but none are required."""
        assert choose_files(["m.gguf", "README.md"]) == ["m.gguf"]
        assert choose_files(["m.gguf", "tokenizer.json", "m.bin"]) == ["m.gguf", "tokenizer.json"]

    def test_one_of_several(self) -> None:
        """The usual quantization is chosen; parts of a split model do not count."""
        names = ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-F16.gguf", "m-Q4_K_M-00001-of-00002.gguf"]
        assert find_generative_graph(names) == ("m-Q4_K_M.gguf",)
        assert find_generative_graph(["m.gguf", "m-00001-of-00002.gguf"]) == ("m.gguf",)

    def test_parts_of_a_split_model(self) -> None:
        """All of them are one model, also in a folder of their own; one file is preferred."""
        small, large = (
            tuple(f"{name}-0000{at}-of-00003.gguf" for at in (1, 2, 3)) for name in ("m-Q4_K_M", "b/m-BF16")
        )
        assert find_generative_graph(large[::-1]) == large
        assert find_generative_graph([*small, *large]) == small
        assert find_generative_graph([*small, *large], "BF16") == large
        assert find_generative_graph([*small, "m-Q4_K_M.gguf"]) == ("m-Q4_K_M.gguf",)
        assert find_generative_graph([*large, "m-BF16.gguf"], "BF16") == ("m-BF16.gguf",)
        assert choose_files([*SETTINGS, *large, "README.md"], form="BF16") == sorted([*SETTINGS, *large])
        for names in (small[1:], small[:2], large[1:]):
            with pytest.raises(SourceError, match=r"-of-00003\.gguf is missing.*put all its parts into one folder"):
                find_generative_graph(names)
        with pytest.raises(SourceError, match="not exactly one Q4_K_M"):
            find_generative_graph([*large, *(name.replace("BF16", "F16") for name in large)])

    def test_folders_that_name_the_quantization(self) -> None:
        """Their files may have equal names; a name that counts no parts is a file of its own."""
        usual, large = (tuple(f"{name}/m-0000{at}-of-00002.gguf" for at in (1, 2)) for name in ("q4_k_m", "m-Q8_0"))
        assert find_generative_graph([*large, *usual]) == usual
        assert find_generative_graph([*large, *usual], "Q8_0") == large
        assert find_generative_graph([*large, "m-q8_0.gguf"], "Q8_0") == ("m-q8_0.gguf",)
        top = tuple(f"m-0000{at}-of-00003.gguf" for at in (1, 2, 3))
        assert find_generative_graph([*usual, *top]) == top
        assert find_generative_graph(["m-00001-of-00000.gguf"]) == ("m-00001-of-00000.gguf",)

    def test_a_quantization(self) -> None:
        """The one that ends a file's name, in any case; projectors of images are not models."""
        names = ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m.f16.gguf", "mmproj-m-Q8_0.gguf", "m-UD-Q4_K_M.gguf"]
        assert find_generative_graph(names, "Q8_0") == ("m-Q8_0.gguf",)
        assert find_generative_graph(names, "F16") == ("m.f16.gguf",)
        assert find_generative_graph(names, "UD-Q4_K_M") == ("m-UD-Q4_K_M.gguf",)
        with pytest.raises(SourceError, match=r"0 of its GGUF files are Q5_0.*m-Q8_0\.gguf"):
            choose_files([*SETTINGS, *names], form="Q5_0")
        assert find_generative_graph(["m-Q8_0.gguf", "mmproj-m-F16.gguf"]) == ("m-Q8_0.gguf",)

    @pytest.mark.parametrize(
        "names", [["a.gguf", "b.gguf"], ["a-Q4_K_M.gguf", "b-q4_k_m.gguf"], ["m-00001-of-00002.gguf"]]
    )
    def test_a_choice_that_is_the_operators(self, names: list[str]) -> None:
        """The error lists the files and the next step."""
        with pytest.raises(SourceError, match=r"gguf.*file:FOLDER"):
            choose_files(names)

    def test_embedders_stay_embedders(self) -> None:
        """Whatever else the repository holds."""
        base = ["config.json", "model.safetensors"]
        assert find_generative_graph([*base, *GRAPH]) == ()
        assert find_generative_graph([*base, "m.gguf"]) == ()
        assert find_generative_graph(["modules.json", *GRAPH]) == ()
        assert find_generative_graph(["onnx/model.onnx", "config.json", *GRAPH]) == ()
        assert find_generative_graph([*base, "generation_config.json", *GRAPH]) == (
            "openvino_model.xml",
            "openvino_model.bin",
        )
        assert choose_files(["modules.json", "generation_config.json", *base])[-1] == "modules.json"

    def test_safetensors_alone_are_refused_before_they_are_fetched(self) -> None:
        """The error names the file and the conversion tool."""
        names = [*SETTINGS, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        with pytest.raises(SourceError, match=r"model-00001-of-00002\.safetensors.*optimum-cli export openvino"):
            choose_files(names)
        assert choose_files(names, weights=False) == SETTINGS

    def test_half_a_graph_is_none(self) -> None:
        """A graph without weights is not a model."""
        with pytest.raises(SourceError):
            choose_files([*SETTINGS, "openvino_model.xml"])

    def test_folders_without_config(self, gguf: Path, tmp_path: Path) -> None:
        """A GGUF file is a complete model; an empty folder is not."""
        assert resolve(parse_address(f"file:{gguf}")).target == str(gguf)
        with pytest.raises(SourceError, match="contains neither"):
            resolve(parse_address(f"file:{gguf}"), weights=False)
        (tmp_path / "empty").mkdir()
        with pytest.raises(SourceError, match="contains neither"):
            resolve(parse_address(f"file:{tmp_path / 'empty'}"))


class TestPrepare:
    def test_from_the_hub(self, on_hub: Hub, store: Store) -> None:
        """Everything is in the store, chat settings included, and the second start needs no network."""
        access = Access(hub=on_hub.url)
        first = prepare(TINY, store=store, access=access, engine=never)
        manifest = first.manifest
        assert manifest.generation == GenerationSpec(
            format="ir",
            tokenizer="tokenizer.json",
            architecture="LlamaForCausalLM",
            context_tokens=2048,
            vocab_size=448,
            stop_ids=(2, 4),
        )
        assert first.graph == first.path / "source" / "openvino_model.xml"
        assert first.graph.read_bytes() == (IR / "openvino_model.xml").read_bytes()
        assert first.tokenizer.read_bytes() == (IR / "tokenizer.json").read_bytes()
        assert {path.name for path in first.path.iterdir()} == {
            *SETTINGS,
            "chat_template.jinja",
            "source",
            "manifest.json",
        }
        assert not [name for name in manifest.files if "pytorch" in name]
        assert manifest.weights.keys() == set(GRAPH)
        assert check_files(first.path, manifest, full=True) == []
        assert read_manifest(first.path) == manifest
        before = len(on_hub.paths)
        assert prepare(TINY, store=store, access=access, engine=never) == first
        assert len(on_hub.paths) == before

    def test_a_folder_is_used_where_it_is(self, ir: Path, store: Store) -> None:
        """Its files are not copied, and changes are detected."""
        first = stored(store, ir)
        assert first.graph == ir / "openvino_model.xml"
        assert first.manifest.generation is not None
        assert first.manifest.generation.place == str(ir)
        assert {path.name for path in first.path.iterdir()} == {*SETTINGS, "manifest.json"}
        assert stored(store, ir) == first
        (ir / "generation_config.json").write_text('{"eos_token_id": 9}')
        again = stored(store, ir)
        assert again.manifest.generation is not None
        assert again.manifest.generation.stop_ids == (9,)
        assert store.entries() == [again]

    def test_a_gguf(self, gguf: Path, store: Store) -> None:
        """Its settings come from its header."""
        entry = stored(store, gguf)
        spec = entry.manifest.generation
        assert spec is not None
        assert (spec.format, spec.context_tokens, spec.stop_ids, spec.vocab_size) == ("gguf", 2048, (4,), 448)
        assert spec.cache_heads == ((4, 8),) * 4
        assert entry.graph == gguf / "tiny-q8_0.gguf"
        assert entry.manifest.parameters == 49312
        assert (entry.path / "tokenizer_config.json").is_file()

    def test_a_split_gguf(self, tmp_path: Path, hub: Hub, store: Store) -> None:
        """All parts are fetched, hashed and counted, from the hub and where they are."""
        folder = tmp_path / "parts"
        folder.mkdir()
        parts = split_tiny(folder)
        entry = stored(store, folder)
        assert entry.graph == folder / parts[0]
        assert entry.size == entry.manifest.size + sum((folder / name).stat().st_size for name in parts)
        below = tmp_path / "below" / "Q8_0"
        below.mkdir(parents=True)
        split_tiny(below)
        assert stored(store, below.parent).graph == below / parts[0]
        hub.files = {f"Q8_0/{name}": (folder / name).read_bytes() for name in parts}
        hub.lfs = frozenset(hub.files)
        fetched = prepare(parse_address("org/tiny:Q8_0"), store=store, access=Access(hub=hub.url), engine=never)
        assert fetched.graph == fetched.path / "source" / "Q8_0" / parts[0]
        assert fetched.manifest.weights.keys() == set(hub.files)
        assert check_files(fetched.path, fetched.manifest, full=True) == []
        (folder / parts[1]).unlink()
        with pytest.raises(SourceError, match=rf"{parts[1]} is missing"):
            stored(store, folder)

    def test_it_does_not_embed(self, ir: Path, store: Store) -> None:
        """A language model has no embedding spec; the error says so."""
        with pytest.raises(ModelFileError, match="language model"):
            _ = stored(store, ir).manifest.text_spec

    def test_removing_leaves_the_folder(self, ir: Path, store: Store) -> None:
        """A folder used in place belongs to the user."""
        store.remove(stored(store, ir))
        assert store.entries() == []
        assert (ir / "openvino_model.bin").is_file()

    def test_causal_models_without_a_graph(self, tmp_path: Path, store: Store) -> None:
        """The error names the config key and the conversion tool."""
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (tmp_path / "model" / "model.safetensors").write_bytes(b"x")
        with pytest.raises(ModelFileError, match=r"config\.json: architectures: .*optimum-cli"):
            stored(store, tmp_path / "model")
        assert store.entries() == []


class TestGraphs:
    def test_the_tiny_one_is_whole(self) -> None:
        """Its weights are counted, including constants in the graph."""
        assert 49312 <= check_ir(IR) < 50000

    def test_a_download_that_was_cut_short(self, ir: Path, store: Store) -> None:
        """It is detected before the model serves."""
        (ir / "openvino_model.bin").write_bytes((IR / "openvino_model.bin").read_bytes()[:-10])
        with pytest.raises(ModelFileError, match=r"openvino_model\.bin: is truncated"):
            stored(store, ir)

    @pytest.mark.parametrize(
        ("old", "new", "match"),
        [
            ('names="logits"', 'names="last_hidden_state"', "not a language model"),
            ('names="input_ids"', 'names="pixel_values"', "not a language model"),
            ('type="ReadValue"', 'type="Other"', "is not stateful"),
            ("<net", "<<net", "not readable"),
            ('offset="', 'offset="x', "not readable"),
            ('offset="', f'offset="{"9" * 5000}', "not readable"),
            ('shape="', f'shape="{10**12}, {10**12}, ', "not readable .it has a shape 1000000000000, "),
            ('shape="', 'shape="-1, ', "not readable .it has a shape -1"),
        ],
    )
    def test_graphs_that_are_no_language_models(self, ir: Path, old: str, new: str, match: str) -> None:
        """Each error names the missing part."""
        graph = ir / "openvino_model.xml"
        assert old in graph.read_text()
        graph.write_text(graph.read_text().replace(old, new))
        with pytest.raises(ModelFileError, match=match):
            check_ir(ir)

    def test_a_tokenizer_is_needed(self, ir: Path, tmp_path: Path) -> None:
        """In a supported format."""
        (ir / "tokenizer.json").unlink()
        with pytest.raises(ModelFileError, match=r"tokenizer\.json: is missing"):
            prepare_generative(ir, tmp_path)

    @pytest.mark.parametrize(
        ("config", "context"),
        [
            ({"max_position_embeddings": 4096}, 4096),
            ({"n_positions": 1024}, 1024),
            ({"text_config": {"max_position_embeddings": 99}}, 99),
            ({"max_position_embeddings": "many"}, None),
            ({"max_position_embeddings": 10**30, "n_positions": 64}, 64),
            ({}, None),
        ],
    )
    def test_the_context(self, ir: Path, tmp_path: Path, config: dict[str, Any], context: int | None) -> None:
        """Several keys can state it; without them it is unknown."""
        (ir / "config.json").write_text(json.dumps(config))
        spec = prepare_generative(ir, tmp_path)
        assert (spec.spec.context_tokens, spec.spec.architecture, spec.spec.vocab_size) == (context, "", 0)

    @pytest.mark.parametrize(
        ("generation", "config", "stops"),
        [
            ({"eos_token_id": 5}, {"eos_token_id": 6}, (5,)),
            ({"eos_token_id": [5, 6]}, {}, (5, 6)),
            ({}, {"eos_token_id": 6}, (6,)),
            ({"eos_token_id": [True, None, -1]}, {}, ()),
        ],
    )
    def test_end_tokens(
        self, ir: Path, tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], stops: tuple[int, ...]
    ) -> None:
        """generation_config.json takes precedence."""
        (ir / "generation_config.json").write_text(json.dumps(generation))
        (ir / "config.json").write_text(json.dumps(config))
        assert prepare_generative(ir, tmp_path).spec.stop_ids == stops

    @pytest.mark.parametrize(
        ("name", "content", "match"),
        [
            ("generation_config.json", {"eos_token_id": [2, 10**20]}, r"eos_token_id: 1000.* is not a token id"),
            ("generation_config.json", {"eos_token_id": 2**31}, r"eos_token_id: 2147483648 is not a token id"),
            ("config.json", {"vocab_size": 10**20}, r"vocab_size: must be at most 2147483647"),
        ],
    )
    def test_numbers_that_no_model_has(
        self, ir: Path, tmp_path: Path, name: str, content: dict[str, Any], match: str
    ) -> None:
        """They are refused by file and key before anything is written."""
        (ir / name).write_text(json.dumps(content))
        with pytest.raises(ModelFileError, match=rf"{name}: {match}"):
            prepare_generative(ir, tmp_path)

    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    def test_brackets_without_end(self, ir: Path, tmp_path: Path, name: str) -> None:
        """A file nested deeper than the parser's limit is refused as unreadable."""
        (ir / name).write_text("[" * 100_000)
        with pytest.raises(ModelFileError, match=rf"{name}: is not valid JSON") as caught:
            prepare_generative(ir, tmp_path)
        assert caught.value.file == name

    @pytest.mark.parametrize(
        ("architectures", "causal"),
        [
            (["LlamaForCausalLM"], True),
            (["GPT2LMHeadModel"], True),
            (["BertModel"], False),
            ("x", False),
            (None, False),
        ],
    )
    def test_architectures(self, tmp_path: Path, architectures: Any, causal: bool) -> None:
        """Known suffixes mark generative models; modules.json makes any model an embedder."""
        (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
        assert is_causal(tmp_path) is causal
        (tmp_path / "modules.json").write_text("[]")
        assert not is_causal(tmp_path)


class TestElsewhere:
    def test_the_settings_of_a_chat_come_with_the_tokenizer(self, on_hub: Hub, store: Store) -> None:
        """They lie next to each other, with additional templates and without weights."""
        on_hub.files["additional_chat_templates/tool_use.jinja"] = b"{{2}}"
        folder = tokenizer_folder("org/tiny", store=store, access=Access(hub=on_hub.url))
        assert {*SETTINGS, "chat_template.jinja"} <= {path.name for path in folder.iterdir()}
        assert (folder / "tokenizer.json").read_bytes() == (IR / "tokenizer.json").read_bytes()
        assert (folder / "additional_chat_templates" / "tool_use.jinja").read_bytes() == b"{{2}}"
        assert not list(folder.rglob("openvino_model.*"))

    def test_odd_settings_of_language_models_are_no_hindrance(self, on_hub: Hub, store: Store) -> None:
        """Settings that an embedder cannot have do not matter to a chat model."""
        config = json.loads(on_hub.files["config.json"]) | {"pad_token_id": -1}
        on_hub.files["config.json"] = json.dumps(config).encode()
        assert (tokenizer_folder("org/tiny", store=store, access=Access(hub=on_hub.url)) / "tokenizer.json").is_file()

    def test_from_a_folder_and_from_the_store(self, ir: Path, on_hub: Hub, store: Store) -> None:
        """A model's own folder, and a model that was pulled before."""
        assert (tokenizer_folder(str(ir), store=store) / "generation_config.json").is_file()
        prepare(TINY, store=store, access=Access(hub=on_hub.url))
        before = len(on_hub.paths)
        folder = tokenizer_folder(Address(scheme="hf", target="org/tiny"), store=store, access=Access(offline=True))
        assert (folder / "chat_template.jinja").read_bytes() == b"{{1}}"
        assert len(on_hub.paths) == before
