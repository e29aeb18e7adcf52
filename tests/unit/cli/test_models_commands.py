"""`shoal pull`, `list`, `show` and `rm` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from shoal.backends import parse_address
from shoal.cli import app
from shoal.config.settings import Settings
from shoal.errors import MissingExtra
from shoal.models.address import Address
from shoal.models.manifest import ImagePart, Manifest, Verdict, measure
from shoal.models.progress import Progress
from shoal.models.store import Store, StoredModel
from shoal.specs import ContrastSpec, ImageSpec, ScoreSpec, TextSpec

Shoal = Callable[..., Result]

SPEC = TextSpec(
    tokenizer="tokenizer.json", inputs=("input_ids",), dimension=8, max_tokens=16, prompts={"query": "query: "}
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def shoal(home: Path, monkeypatch: pytest.MonkeyPatch) -> Shoal:
    """Run the command line with its own store and no settings file."""
    monkeypatch.chdir(home.parent)
    environment = {"SHOAL_HOME": str(home), "SHOAL_CONFIG": None, "SHOAL_OFFLINE": None, "NO_COLOR": "1"}

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments], env=environment, catch_exceptions=False)

    return run


@pytest.fixture
def put(home: Path) -> Callable[..., StoredModel]:
    """Store a model of a few bytes."""

    def put(
        text: str,
        *,
        created: int = 1_700_000_000,
        verification: Verdict | None = None,
        spec: TextSpec | None = SPEC,
        image: ImagePart | None = None,
        contrast: ContrastSpec | None = None,
    ) -> StoredModel:
        store, address = Store(home), parse_address(text)
        with store.working(address) as partial:
            (partial / "model.onnx").write_bytes(b"x" * 1500)
            manifest = Manifest(
                id=address.id,
                address=str(address),
                source=str(address),
                revision="r1",
                converter=1,
                graph="model.onnx",
                graph_source="built",
                weights={},
                conversion="built from config.json and safetensors",
                parameters=22_713_216,
                text=spec,
                image=image,
                contrast=contrast,
                verification=verification,
                created=created,
                files=measure(partial),
            )
            return store.commit(partial, address, manifest)

    return put


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local model, a converter without cost, and no engine to verify with."""

    def choose(engine: str) -> str:
        raise MissingExtra("an engine", "local")

    def convert(folder: Path, target: Path, *, progress: object) -> SimpleNamespace:
        (target / "model.onnx").write_bytes(b"graph")
        return SimpleNamespace(spec=SPEC, graph="model.onnx", source="built", parameters=5, text="built by a test")

    monkeypatch.setattr("shoal.models.convert.convert.convert", convert)
    monkeypatch.setattr("shoal.backends.local.open.choose_engine", choose)
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    return model


def test_pull_stores_a_model(shoal: Shoal, folder: Path, home: Path) -> None:
    """After pull the model is in the store, and the answer says how to serve it."""
    result = shoal("pull", f"file:{folder}")
    assert result.exit_code == 0
    assert "tiny is ready" in result.stdout
    assert f"shoal serve file:{folder}" in result.stdout
    assert "graph: built by a test; verified not yet: checked when first served" in result.stdout
    assert [one.manifest.id for one in Store(home).entries()] == ["tiny"]


def test_pull_errors_are_one_line_with_the_next_step(shoal: Shoal, home: Path) -> None:
    """A failure is one line on standard error, exit code 1; a wrong address is wrong usage, exit code 2."""
    failed = shoal("pull", "--offline", "org/tiny")
    assert failed.exit_code == 1
    assert failed.stdout == ""
    assert failed.stderr.startswith("error: the store has no usable hf:org/tiny, and `offline` is set")
    assert failed.stderr.count("\n") == 1
    wrong = shoal("pull", "a/b/c")
    assert wrong.exit_code == 2
    assert "org/name" in wrong.stderr


def test_list_is_a_table(shoal: Shoal, put: Callable[..., StoredModel]) -> None:
    """One line per model, newest first, with name, id, size and age; an exact revision is part of the name."""
    put("org/old@v1")
    stored = put(
        "org/a-model-with-quite-a-long-name-that-no-pipe-may-ever-cut-or-fold-" + "x" * 30, created=1_800_000_000
    )
    result = shoal("list")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["NAME", "ID", "SIZE", "MODIFIED"]
    assert lines[1][:4] == [stored.manifest.id, stored.manifest.digest[:12], "2", "kB"]
    assert lines[2][0] == "org/old@v1"
    assert lines[2][-1] == "ago"


def test_list_as_json(shoal: Shoal, put: Callable[..., StoredModel]) -> None:
    """--json has the same data in bytes and ISO time; an empty store is an empty list."""
    assert json.loads(shoal("list", "--json").stdout) == []
    stored = put("org/tiny")
    (entry,) = json.loads(shoal("list", "--json").stdout)
    assert entry["name"] == "org/tiny"
    assert entry["size"] == 1500
    assert entry["modified"] == "2023-11-14T22:13:20+00:00"
    assert entry["path"] == str(stored.path)


@pytest.mark.parametrize("name", ["org/tiny", "hf:org/tiny"])
def test_show_finds_a_model_by_name_and_address(shoal: Shoal, put: Callable[..., StoredModel], name: str) -> None:
    """The model's facts, as text and as JSON."""
    put("org/tiny", verification=Verdict("the graph agrees", 0.9999))
    shown = shoal("show", name).stdout
    for part in ("query: ", "22713216", "2 kB", "the graph agrees", "built from config.json"):
        assert part in shown
    facts = json.loads(shoal("show", name, "--json").stdout)
    assert (facts["dimension"], facts["max_tokens"], facts["verified"]) == (8, 16, "the graph agrees")


def test_show_of_a_model_that_scores(shoal: Shoal, put: Callable[..., StoredModel]) -> None:
    """Labels and activation are shown, and no vectors."""
    score = ScoreSpec(labels=("no", "yes"), activation="softmax")
    put("org/judge", spec=msgspec.structs.replace(SPEC, dimension=0, score=score))
    facts = json.loads(shoal("show", "org/judge", "--json").stdout)
    assert (facts["task"], facts["labels"], facts["activation"]) == ("classify", "no, yes", "softmax")
    assert not {"dimension", "pooling", "similarity"} & set(facts)


def test_show_of_a_dual_encoder(shoal: Shoal, put: Callable[..., StoredModel]) -> None:
    """Texts and images, their comparison, and both verification results are shown."""
    image_part = ImagePart(
        graph="image.onnx", spec=ImageSpec(size=(224, 320), dimension=8), verification=Verdict("images agree", 1.0)
    )
    put("org/clip", verification=Verdict("texts agree", 1.0), image=image_part, contrast=ContrastSpec(scale=100.0))
    facts = json.loads(shoal("show", "org/clip", "--json").stdout)
    assert (facts["pictures"], facts["image_graph"], facts["max_tokens"]) == ("320 x 224", "image.onnx", 16)
    assert facts["compared_by"] == "softmax of 100 * cosine + 0"
    assert facts["verified"] == "texts agree; images agree"


def test_show_of_an_image_classifier(shoal: Shoal, put: Callable[..., StoredModel]) -> None:
    """Neither texts nor vectors are listed."""
    score = ScoreSpec(labels=("cat", "dog"), activation="softmax", pairs=False)
    image = ImagePart(graph="model.onnx", spec=ImageSpec(size=(32, 32), dimension=0, score=score))
    put("org/cats", spec=None, image=image)
    facts = json.loads(shoal("show", "org/cats", "--json").stdout)
    assert (facts["task"], facts["labels"], facts["verified"]) == ("classify", "cat, dog", None)
    assert not {"dimension", "max_tokens", "compared_by"} & set(facts)


def test_show_why(shoal: Shoal, put: Callable[..., StoredModel], home: Path) -> None:
    """How the model is read, what runs it, and what was measured on this machine."""
    stored = put("org/tiny", verification=Verdict("the graph agrees", 0.9999))
    shown = shoal("show", "org/tiny", "--why").stdout
    assert "query: 'query: '" in shown
    assert "engine         openvino" in shown
    assert "auto; not compared on this machine yet" in shown
    assert "differs        longer texts are cut" in shown
    Store(home).note(stored, "precision", {"key": "k", "precision": "bf16", "figures": {"mean_cosine": 0.9999}})
    facts = json.loads(shoal("show", "org/tiny", "--why", "--json").stdout)
    assert facts["precision"].startswith("auto; bf16 compared with f32: mean cosine 0.999900")
    assert (facts["verified"], len(facts["differs"])) == ("the graph agrees", 1)


def test_show_lists_variants(shoal: Shoal, put: Callable[..., StoredModel], home: Path) -> None:
    """The variants made on this machine: bytes, and parity and speed if measured."""
    stored = put("org/tiny")
    assert json.loads(shoal("show", "org/tiny", "--json").stdout)["variants"] == {}
    for variant in ("int8", "fp16"):
        (stored.path / f"model.{variant}.onnx").write_bytes(b"x" * 700)
    parity = {"key": "openvino", "min_cosine": 0.98629, "mean_cosine": 0.99873, "speed": {"16x8": 2.5}, "bytes": 700}
    Store(home).note(stored, "variant_int8", parity)
    facts = json.loads(shoal("show", "org/tiny", "--json").stdout)
    assert facts["graph_source"] == "built"
    measured = {name: parity[name] for name in ("min_cosine", "mean_cosine", "speed", "bytes")}
    assert facts["variants"] == {"int8": measured, "fp16": {"bytes": 700}}
    shown = shoal("show", "org/tiny").stdout
    assert "int8: 700 B, mean cosine to f32 0.9987, minimum 0.9863, 2.5x f32 (16x8); fp16: 700 B" in shown
    Store(home).note(stored, "variant_fp16", {"key": "openvino", "max_difference": 0.01, "bytes": 700})
    assert "fp16: 700 B, scores move by 0.0100 of their range" in shoal("show", "org/tiny").stdout


def test_show_finds_the_default_model_by_its_alias(shoal: Shoal, put: Callable[..., StoredModel]) -> None:
    """The default model has its short name here too."""
    put("sentence-transformers/all-MiniLM-L6-v2")
    assert shoal("show", "all-MiniLM-L6-v2").exit_code == 0


def test_a_pair_of_open_clip_s_names_is_its_repository(
    shoal: Shoal, put: Callable[..., StoredModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is pulled, shown and removed by the names under which it is served."""
    pair, repository = "ViT-B-32/openai", "timm/vit_base_patch32_clip_224.openai"

    def prepared(address: Address, settings: Settings, *, progress: Progress, refresh: bool) -> StoredModel:
        return put(str(address))

    monkeypatch.setattr("shoal.backends.local.open.prepare_local", prepared)
    assert f"{repository} is ready" in shoal("pull", pair).stdout
    assert json.loads(shoal("show", pair, "--json").stdout)["name"] == repository
    assert f"removed {repository}" in shoal("rm", pair).stdout


def test_show_verify_reads_every_file(shoal: Shoal, put: Callable[..., StoredModel]) -> None:
    """--verify reports success, or names the damaged file and the fix with exit code 1."""
    stored = put("org/tiny")
    assert "all 1 files" in shoal("show", "org/tiny", "--verify").stdout
    stored.graph.write_bytes(b"y" * 1500)
    result = shoal("show", "org/tiny", "--verify", "--json")
    assert result.exit_code == 1
    assert "model.onnx has changed" in result.stderr
    assert "shoal pull --refresh hf:org/tiny" in result.stderr
    assert "model.onnx" in json.loads(result.stdout)["damaged"][0]


def test_unknown_names_are_answered_with_a_guess(shoal: Shoal, put: Callable[..., StoredModel]) -> None:
    """The error of a misspelled name suggests a similar one."""
    put("org/tiny")
    for verb in ("show", "rm"):
        result = shoal(verb, "org/tinny")
        assert result.exit_code == 1
        assert "did you mean org/tiny?" in result.stderr
    assert "`shoal list`" in shoal("show", "unlike-anything").stderr


def test_rm_removes_every_revision_or_the_one_named(shoal: Shoal, put: Callable[..., StoredModel], home: Path) -> None:
    """A revision removes only itself; the bare name removes all others."""
    for text in ("org/tiny", "org/tiny@v1", "org/tiny@v2", "org/other"):
        put(text)
    assert shoal("rm", "org/tiny@v1").stdout == "removed org/tiny@v1 (2 kB)\n"
    assert len(Store(home).entries()) == 3
    assert shoal("rm", "org/tiny").stdout.count("removed") == 2
    assert [one.manifest.id for one in Store(home).entries()] == ["org/other"]


class TestTriton:
    @pytest.fixture(autouse=True)
    def publish_calls(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        """Record the calls of the composition root, in place of a Triton."""
        calls: list[tuple[Any, ...]] = []

        async def publish(name: str, stored: StoredModel, settings: Settings) -> str:
            calls.append((stored.manifest.address, settings.triton_repository, settings.triton_instances))
            return f"written to {settings.triton_repository}"

        async def withdraw(name: str, settings: Settings) -> bool:
            calls.append((name, settings.triton_repository))
            return name == "org/tiny"

        monkeypatch.setattr("shoal.backends.triton.open.publish", publish, raising=False)
        monkeypatch.setattr("shoal.backends.triton.open.withdraw", withdraw, raising=False)
        return calls

    def test_pull_writes_into_a_repository(
        self, shoal: Shoal, folder: Path, home: Path, publish_calls: list[tuple[Any, ...]]
    ) -> None:
        """The model is in the store and in the repository, with the options of the flags."""
        flags = ["--to", "triton", "--triton-repository", "repo", "--triton-instances", "2"]
        result = shoal("pull", f"file:{folder}", *flags)
        assert result.exit_code == 0, result.output
        assert result.stdout.endswith(": written to repo\n")
        assert publish_calls == [(f"file:{folder}", "repo", 2)]
        assert [one.manifest.id for one in Store(home).entries()] == ["tiny"]

    def test_rm_takes_it_out_of_the_repository(
        self, shoal: Shoal, put: Callable[..., StoredModel], home: Path, publish_calls: list[tuple[Any, ...]]
    ) -> None:
        """The store keeps its copy; an unknown name is an error."""
        put("org/tiny")
        result = shoal("rm", "org/tiny", "--from", "triton", "--triton-repository", "repo")
        assert (result.exit_code, result.stdout) == (0, "removed org/tiny from repo\n"), result.output
        assert len(Store(home).entries()) == 1
        result = shoal("rm", "org/other", "--from", "triton", "--triton-repository", "repo")
        assert result.exit_code == 1
        assert result.stderr == "error: org/other is not in repo: check its name there\n"
        assert publish_calls == [("org/tiny", "repo"), ("org/other", "repo")]

    @pytest.mark.parametrize("words", [("pull", "org/tiny", "--to", "triton"), ("rm", "org/tiny", "--from", "triton")])
    def test_a_repository_must_be_named(
        self, shoal: Shoal, publish_calls: list[tuple[Any, ...]], words: tuple[str, ...]
    ) -> None:
        """The usage error comes before anything is fetched or removed, with exit code 2."""
        result = shoal(*words)
        assert result.exit_code == 2
        assert "--triton-repository DIR" in result.stderr
        assert publish_calls == []

    def test_rm_has_one_place_to_remove_from(self, shoal: Shoal, publish_calls: list[tuple[Any, ...]]) -> None:
        """A server knows its own repository."""
        result = shoal("rm", "m", "--from", "triton", "--url", "http://localhost:1", "--triton-repository", "repo")
        assert result.exit_code == 2
        assert "--url and --from are mutually exclusive" in result.stderr
        assert publish_calls == []


class TestLanguageModels:
    FOLDER = Path(__file__).parents[2] / "fixtures" / "tiny_llama_ir"

    def test_from_pull_to_rm(self, shoal: Shoal) -> None:
        """Models are pulled, listed, shown and removed; a folder used in place stays."""
        assert shoal("pull", f"file:{self.FOLDER}").exit_code == 0
        assert "tiny_llama_ir" in shoal("list").stdout
        shown = json.loads(shoal("show", "tiny_llama_ir", "--json", "--verify").stdout)
        assert (shown["task"], shown["context_tokens"], shown["damaged"]) == ("generate", 2048, [])
        assert shown["used_in_place"] == str(self.FOLDER)
        assert "dimension" not in shown
        words = shoal("show", "tiny_llama_ir").stdout
        assert "LlamaForCausalLM" in words
        assert "removed tiny_llama_ir" in shoal("rm", "tiny_llama_ir").stdout
        assert (self.FOLDER / "openvino_model.bin").is_file()
