"""Models on a Triton that Shoal did not write, and models that Shoal writes for Triton's own clients."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from shoal.types import Array
from tests.integration.server_kit import Server
from tests.integration.triton_app_kit import (
    PROMPTS,
    TINY,
    add_model,
    ask,
    cosines,
    embeddings,
    hub_of,
    logged,
    serving,
    status_of,
    until,
    vectors,
)
from tests.integration.triton_kit import PATIENCE_S, OwnTriton, Triton, triton_home
from tests.integration.triton_models import near_free_vector, token_vectors
from tests.unit.models.checkpoints import checkpoint

pytestmark = pytest.mark.timeout(PATIENCE_S)

TEXTS = ["fish", "to gether", "fishing together, quite a long text", "Größe \N{FISH}", "", " "]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    with hub_of(tmp_path / "hub") as url:
        yield url


@pytest.fixture
def env(tmp_path: Path, hub: str) -> dict[str, str]:
    return {"SHOAL_HOME": str(triton_home(tmp_path / "home")), "HF_ENDPOINT": hub}


def test_a_model_that_reads_text(triton: Triton, tmp_path: Path) -> None:
    """One BYTES tensor in, a vector out: the client gets its exact numbers, by name and by full address."""
    triton.load("near_free")
    expected = np.stack([near_free_vector(text) for text in TEXTS[:4]])
    with serving(tmp_path, [f"triton://{triton.url}#near_free"]) as server:
        _, _, answer = ask(server, "POST", "/embed", {"inputs": TEXTS[:4], "normalize": False})
        assert np.array_equal(np.array(answer, np.float32), expected)
        rows = vectors(server, "near_free", TEXTS[:4])
        assert np.allclose(rows, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)
        _, _, answer = ask(server, "GET", "/v1/models/near_free")
        assert (answer["backend"], answer["dimension"]) == ("triton", 1024)
        _, headers, answer = embeddings(server, "near_free", "a", dimensions=3)
        assert len(answer["data"][0]["embedding"]) == 3
        assert len(headers["x-shoal-space"]) == 16
        assert embeddings(server, "near_free", [[1, 2, 3]])[0] == 400
    assert triton.state("near_free") == "READY", "closing Shoal unloads nothing"


def unit_vector(text: str) -> Array:
    vector = near_free_vector(text)
    return np.asarray(vector / np.linalg.norm(vector))


def test_a_named_model_is_loaded(triton: Triton, tmp_path: Path) -> None:
    """Shoal loads a named model of the repository."""
    triton.unload("near_free")
    with serving(tmp_path, [f"mine=triton://{triton.url}#near_free"]) as server:
        assert np.allclose(vectors(server, "mine", "a")[0], unit_vector("a"), atol=1e-6)
        assert triton.state("near_free") == "READY"


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("unit", [False, True])
def test_a_model_that_reads_tokens(triton: Triton, tmp_path: Path, pooling: str, unit: bool) -> None:
    """Shoal tokenizes with the configured tokenizer, and pools the token vectors."""
    folder = checkpoint(tmp_path / "tokenizer")
    config = f"""
[models.tokens]
backends = ["triton://{triton.url}#tokens_in"]
tokenizer = "{folder}"
pooling = "{pooling}"
max_tokens = 12
normalize = {str(unit).lower()}
prompts = {{query = "to fish: "}}
"""
    triton.load("tokens_in")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(12)
    with serving(tmp_path / "server", [], config=config) as server:
        for prefix, more in (("", {}), ("to fish: ", {"prompt_name": "query"})):
            rows = np.array(ask(server, "POST", "/embed", {"inputs": TEXTS[:4], "model": "tokens", **more})[2])
            ids = [tokenizer.encode(prefix + text).ids for text in TEXTS[:4]]
            assert len({len(each) for each in ids}) > 2
            assert np.allclose(rows, [pooled(token_vectors(each), pooling, unit) for each in ids], atol=1e-5)
        _, headers, answer = embeddings(server, "tokens", TEXTS[:4])
        assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text).ids) for text in TEXTS[:4])
        assert headers["x-shoal-truncated"] == "1"


def pooled(rows: Any, pooling: str, unit: bool) -> Any:
    row = {"mean": rows.mean(axis=0), "cls": rows[0], "lasttoken": rows[-1]}[pooling]
    return row / np.linalg.norm(row) if unit else row


def test_the_error_without_a_tokenizer_names_the_setting(triton: Triton, tmp_path: Path) -> None:
    """The model fails; other named models are served."""
    addresses = [f"triton://{triton.url}#tokens_in", "fake:"]
    triton.load("tokens_in")
    with serving_unready(tmp_path, addresses) as server:
        until(lambda: "tokenizer" in logged(server), what="the reason")
        assert status_of(server, "tokens_in") in ("unloaded", "failed")
        assert vectors(server, "fake", "a").shape[0] == 1
        assert triton.state("tokens_in") == "READY"


def serving_unready(*arguments: Any, **more: Any) -> Any:
    return serving(*arguments, ready=False, **more)


def test_a_whole_server(own_triton: OwnTriton, tmp_path: Path) -> None:
    """If the address names no model, Shoal serves all loaded models, and follows later loads and unloads."""
    triton = own_triton()
    triton.load("near_free", "decoupled")
    with serving(tmp_path, [f"triton://{triton.url}"]) as server:
        until(lambda: status_of(server, "near_free") == "loaded", what="the first look")
        assert np.allclose(vectors(server, "near_free", "a")[0], unit_vector("a"), atol=1e-6)
        until(lambda: "decoupled of triton" in logged(server), what="the reason")
        assert "is not served" in logged(server)
        triton.load("failing")
        until(lambda: status_of(server, "failing") == "loaded", what="a later look")
        assert vectors(server, "failing", "a").shape == (1, 8)
        assert triton.state("decoupled") == "READY"
        assert triton.http("POST", "/v2/models/near_free/infer", {"inputs": [text_tensor("x")]})[0] == 200
    assert triton.state("failing") == "READY"


def text_tensor(*texts: str) -> dict[str, Any]:
    return {"name": "text", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}


def test_unsupported_models_are_listed_and_left_unchanged(triton: Triton, tmp_path: Path, env: dict[str, str]) -> None:
    """Loading a model with streamed answers fails with the reason, and leaves it unchanged; nobody may delete it."""
    triton.unload("decoupled")
    before = entry_files(triton, "decoupled")
    place = ["--triton-url", triton.url, "--triton-repository", str(triton.repository)]
    with serving(tmp_path / "server", [], "--no-default-model", *place, env=env) as server:
        _, _, answer = ask(server, "GET", "/models")
        assert {each["id"] for each in answer["data"]} >= {"decoupled", "near_free", "tokens_in"}
        status, _, answer = ask(server, "POST", "/v1/models/decoupled/load", {})
        assert status >= 400, answer
        assert "decoupled" in answer["error"]["message"]
        assert triton.state("decoupled") != "READY", "what could not be served was not left loaded"
        assert ask(server, "DELETE", "/v1/models/decoupled", {})[0] == 403
        status, _, answer = ask(server, "POST", "/v1/models/near_free/load", {})
        assert status == 200, answer
        assert np.allclose(vectors(server, "near_free", "a")[0], unit_vector("a"), atol=1e-6)
        assert ask(server, "DELETE", "/v1/models/near_free", {})[0] == 403
        assert vectors(server, "near_free", "a").shape == (1, 1024)
    assert entry_files(triton, "decoupled") == before


def entry_files(triton: Triton, name: str) -> list[Path]:
    """The files in a model's folder, without Python's compiled ones."""
    return sorted(path for path in (triton.repository / name).rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("pushed", [False, True], ids=["written", "pushed"])
def test_texts_in_for_clients_of_triton(triton: Triton, tmp_path: Path, env: dict[str, str], pushed: bool) -> None:
    """With text_in, Triton alone answers texts, with Shoal's vectors; so does another Shoal in front of it."""
    place = ["--triton-url", triton.url] + ([] if pushed else ["--triton-repository", str(triton.repository)])
    with serving(tmp_path / "server", [], "--no-default-model", *place, env=env) as server:
        status, _, answer = ask(server, "POST", f"/v1/models/{TINY}/load", {"text_in": True})
        assert status == 200, answer
        expected = vectors(server, TINY, TEXTS[:4])
        status, answer = triton.infer("org~tiny", *TEXTS[:4])
        assert status == 200, answer
        [output] = answer["outputs"]
        rows = np.array(output["data"], np.float32).reshape(output["shape"])
        assert cosines(rows, expected).min() >= 0.99999
        with serving(tmp_path / "second", [f"again=triton://{triton.url}#org~tiny"]) as second:
            assert cosines(vectors(second, "again", TEXTS[:4]), expected).min() >= 0.99999
        status, _, answer = ask(server, "DELETE", f"/v1/models/{TINY}", {})
        assert status == 200, answer
    assert not [path.name for path in triton.repository.iterdir() if "tiny" in path.name]
    assert triton.infer("org~tiny", "a")[0] != 200
    for part in ("org~tiny", "org~tiny.encoder", "org~tiny.tokenizer"):
        assert triton.state(part) in ("", "UNAVAILABLE")


def test_another_shoal_serves_a_written_entry(triton: Triton, tmp_path: Path, env: dict[str, str]) -> None:
    """The entry keeps prompts, length and pooling; its vectors and space are those of the local engine."""
    place = ["--triton-url", triton.url, "--triton-repository", str(triton.repository)]
    with serving(tmp_path / "writer", [TINY], *place, env=env):
        assert triton.state("org~tiny") == "READY"
    with (
        serving(tmp_path / "local", [f"here=hf:{TINY}"], "--precision", "f32", env=env) as local,
        serving(tmp_path / "reader", [f"there=triton://{triton.url}#org~tiny"], env=env) as reader,
    ):
        for more in ({}, {"prompt_name": "query"}, {"prompt_name": "document", "normalize": False}):
            rows, headers = [], []
            for server, name in ((local, "here"), (reader, "there")):
                status, header, answer = ask(server, "POST", "/embed", {"inputs": TEXTS[:4], "model": name, **more})
                assert status == 200, answer
                rows.append(np.array(answer, np.float32))
                headers.append(header)
            assert np.allclose(rows[0], rows[1], atol=1e-4), more
            assert headers[0]["x-shoal-space"] == headers[1]["x-shoal-space"]
            assert headers[0]["x-compute-tokens"] == headers[1]["x-compute-tokens"]
        assert set(PROMPTS) == {"query", "document"}
    shutil.rmtree(triton.repository / "org~tiny")
    triton.unload("org~tiny")


def test_an_expected_dimension_that_is_wrong(triton: Triton, tmp_path: Path) -> None:
    """The model decides; a mismatch fails the model with both numbers."""
    config = f'[models.near]\nbackends = ["triton://{triton.url}#near_free"]\ndimension = 384\n'
    config += '[models.fake]\nbackends = ["fake:"]\n'
    triton.load("near_free")
    with serving_unready(tmp_path, [], config=config) as server:
        until(lambda: "384" in logged(server) and "1024" in logged(server), what="the reason")
        assert embeddings(server, "near", "a")[0] >= 500


def test_tensors_under_other_names(triton: Triton, tmp_path: Path) -> None:
    """Two inputs could be the text: the configuration says which tensor is which."""
    add_model(triton, "renamed", "near_free", {'name: "text"': 'name: "prompt"', 'name: "embedding"': 'name: "vec"'})
    code = (triton.repository / "renamed" / "1" / "model.py").read_text()
    code = code.replace('"text"', '"prompt"').replace('"embedding"', '"vec"')
    (triton.repository / "renamed" / "1" / "model.py").write_text(code)
    config = f"""
[models.renamed]
backends = ["triton://{triton.url}#renamed"]
input_names = {{text = "prompt"}}
output_names = {{embedding = "vec"}}
"""
    with serving(tmp_path, [], config=config) as server:
        assert np.allclose(vectors(server, "renamed", "a")[0], unit_vector("a"), atol=1e-6)


def names(server: Server) -> set[str]:
    return {each["id"] for each in ask(server, "GET", "/models")[2]["data"]}
