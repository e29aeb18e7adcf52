"""Image-text models on a real Triton: two entries, written, loaded, found again and deleted together, with the vectors
of the local engine."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from msgspec import structs

import shoal
from shoal.backends import parse_address
from shoal.backends.local.open import prepare_local
from shoal.backends.triton.open.connections import TritonConnections
from shoal.backends.triton.open.host import TritonHost
from shoal.config.settings import Settings
from shoal.errors import InvalidValue, ModelFailed
from shoal.python.api import Shoal
from shoal.types import Embedded
from tests.integration.test_triton_family import counts, when_available
from tests.integration.triton_app_kit import ask, cosines, serving, status_of, until
from tests.integration.triton_kit import PATIENCE_S, OwnTriton, Triton
from tests.unit.models import tower_checkpoints
from tests.unit.models.tower_checkpoints import FAMILIES, SIZE, towers

# The models of the module hold gRPC's threads, whose end blocks the loop that drops the last connection.
pytestmark = [pytest.mark.timeout(PATIENCE_S), pytest.mark.usefixtures("family")]

USERS = 32
TEXTS = ["a cat", "b", "a dog, on a hill!", " ".join("abcdefghijklmnop")]
"""The last one exceeds the model's context."""


def draw_image(width: int, height: int, seed: int = 0, kind: str = "PNG", mode: str = "RGB") -> bytes:
    drawn = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(drawn).convert(mode).save(file, kind)
    return file.getvalue()


IMAGES = [
    draw_image(40, 20),
    draw_image(9, 31, 1, "JPEG"),
    draw_image(SIZE, SIZE, 2, "BMP"),
    draw_image(33, 33, 3, "GIF", "P"),
]
BROKEN = IMAGES[0][:60]


def configuration(folder: Path, triton: Triton, *families: str, **more: str) -> Path:
    """A shoal.toml that has each model twice: NAME on Triton, NAME-here on the engine of this process."""
    lines = [f'{key} = "{value}"' for key, value in more.items()] + ["max_wait_time_ms = 20"]
    lines += [f'triton_url = "{triton.url}"', 'triton_platform = "python"', 'precision = "f32"']
    if "triton_repository" not in more:
        lines.append(f'triton_repository = "{triton.repository}"')
    lines.append(f'home = "{folder / "home"}"')
    for family in families:
        model = folder / family
        if not model.is_dir():
            model.mkdir(parents=True)
            towers(model, family)
        for served, backend in ((family, "triton"), (f"{family}-here", "local")):
            lines += [f'[models."{served}"]', f'backends = ["file:{model}"]', f'backend = "{backend}"']
    path = folder / "shoal.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def family(triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shoal]:
    folder = tmp_path_factory.mktemp("towers")
    with shoal.open(config=configuration(folder, triton, *FAMILIES)) as client:
        yield client
    for name in FAMILIES:
        for part in (name, f"{name}~~image"):
            triton.unload(part)
            shutil.rmtree(triton.repository / part)


def embedded(model: Shoal, inputs: list[Any], name: str, **more: Any) -> Embedded:
    return model.embed(inputs, model=name, outputs=("dense",), **more)


def mixed() -> list[Any]:
    return [each for pair in zip(TEXTS, IMAGES, strict=True) for each in pair]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("normalize", [True, False])
def test_the_vectors_are_those_of_the_local_engine(family: Shoal, name: str, normalize: bool) -> None:
    """Texts, images, and both mixed in one call."""
    for inputs in (TEXTS, IMAGES, mixed()):
        here, there = (embedded(family, inputs, model, normalize=normalize) for model in (f"{name}-here", name))
        assert cosines(here.vectors, there.vectors).min() >= 0.99999
        np.testing.assert_allclose(there.vectors, here.vectors, rtol=1e-4, atol=1e-5)
        assert (here.tokens, here.truncated, here.space) == (there.tokens, there.truncated, there.space)
    assert not np.allclose(there.vectors[0], there.vectors[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_images_are_compared_with_texts(family: Shoal, name: str) -> None:
    here, there = (family.rank(IMAGES[0], TEXTS, model=model) for model in (f"{name}-here", name))
    assert [each.text for each in there] == [each.text for each in here]
    np.testing.assert_allclose([each.score for each in there], [each.score for each in here], atol=1e-4)


def test_a_broken_image_fails_alone(family: Shoal) -> None:
    """The error names its index; concurrent requests of others are answered."""

    async def ask(inputs: list[Any]) -> Any:
        return await family.aembed(inputs, model="clip", outputs=("dense",))

    async def everybody() -> list[Any]:
        each = [ask([one]) for one in IMAGES] + [ask(["a cat", IMAGES[0], BROKEN]), ask([BROKEN])]
        return await asyncio.gather(*each, return_exceptions=True)

    *good, third, alone = asyncio.run(everybody())
    expected = embedded(family, list(IMAGES), "clip").vectors
    assert cosines(np.concatenate([each.vectors for each in good]), expected).min() >= 0.99999
    assert isinstance(third, InvalidValue)
    assert isinstance(alone, InvalidValue)
    assert "input 2" in third.message


async def test_users_share_calls_of_each_tower(family: Shoal, triton: Triton) -> None:
    """Texts with texts, images with images."""
    texts: list[Any] = [f"{chr(97 + number % 26)} b {chr(97 + number // 26)}" for number in range(USERS)]
    items = [*texts, *(draw_image(12, 12, 100 + number) for number in range(USERS))]
    parts = ("clip", "clip~~image")
    before = [await asyncio.to_thread(counts, triton, part) for part in parts]
    await asyncio.gather(*(family.aembed([item], model="clip") for item in items))
    after = [await asyncio.to_thread(counts, triton, part) for part in parts]
    for then, now in zip(before, after, strict=True):
        requests, answered, _ = (late - early for late, early in zip(now, then, strict=True))
        assert answered == USERS
        assert requests <= USERS * 3 // 4


def test_the_two_entries(family: Shoal, triton: Triton) -> None:
    _, config = triton.http("GET", "/v2/models/clip~~image/config")
    assert [(one["name"], one["data_type"], one["dims"]) for one in config["input"]] == [
        ("pixel_values", "TYPE_FP32", [3, SIZE, SIZE])
    ]
    assert [(one["name"], one["data_type"], one["dims"]) for one in config["output"]] == [
        ("image_embeds", "TYPE_FP32", [8])
    ]
    _, config = triton.http("GET", "/v2/models/clip/config")
    assert config["input"][0]["name"] == "input_ids"


def test_another_shoal_knows_them_by_their_entries(family: Shoal, triton: Triton, tmp_path: Path) -> None:
    """Its home is empty: the model is found by address, and in the list of the whole server, where the image tower is
    no model of its own."""
    config = tmp_path / "shoal.toml"
    config.write_text(f'[models.clip]\nbackends = ["triton://{triton.url}#clip"]\n')
    here = embedded(family, mixed(), "clip")
    with shoal.open(config=config, home=str(tmp_path / "home")) as other:
        there = embedded(other, mixed(), "clip")
    np.testing.assert_allclose(there.vectors, here.vectors, rtol=1e-5, atol=1e-6)
    assert (here.tokens, here.space) == (there.tokens, there.space)


@pytest.mark.parametrize("towers_", ["text", "image"])
def test_one_tower_of_them(family: Shoal, triton: Triton, tmp_path: Path, towers_: str) -> None:
    """Shoal does not load a tower that is not needed, and rejects its inputs by name."""
    config = tmp_path / "shoal.toml"
    config.write_text(f'towers = "{towers_}"\n[models.clip]\nbackends = ["triton://{triton.url}#clip"]\n')
    mine, others = (TEXTS, IMAGES) if towers_ == "text" else (IMAGES, TEXTS)
    with shoal.open(config=config, home=str(tmp_path / "home")) as other:
        there = embedded(other, list(mine), "clip")
        np.testing.assert_allclose(there.vectors, embedded(family, list(mine), "clip").vectors, rtol=1e-5, atol=1e-6)
        with pytest.raises(InvalidValue):
            embedded(other, list(others), "clip")


def test_many_large_images(triton: Triton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 images of 224 x 224 are 38 MB: more than a call takes, so they go in several."""
    monkeypatch.setattr(tower_checkpoints, "SIZE", 224)
    monkeypatch.setattr(tower_checkpoints, "PATCH", 32)
    (tmp_path / "clip").mkdir()
    config = configuration(tmp_path, triton)
    address = f"file:{towers(tmp_path / 'clip')}"
    lines = [config.read_text(), "max_batch_tokens = 100000"]
    for served, backend in (("large", "triton"), ("large-here", "local")):
        lines += [f'[models."{served}"]', f'backends = ["{address}"]', f'backend = "{backend}"']
    config.write_text("\n".join(lines))
    drawn: list[Any] = [draw_image(20, 20, seed) for seed in range(64)]
    with shoal.open(config=config) as client:
        here, there = (embedded(client, drawn, model) for model in ("large-here", "large"))
        assert cosines(here.vectors, there.vectors).min() >= 0.99999
        _, answer = triton.http("GET", "/v2/models/large~~image/config")
        assert answer["max_batch_size"] * 3 * 224 * 224 * 4 <= 2**25
    for part in ("large", "large~~image"):
        triton.unload(part)
        shutil.rmtree(triton.repository / part)


def states(triton: Triton, name: str) -> list[str]:
    return [triton.state(part) for part in (name, f"{name}~~image")]


@pytest.mark.parametrize("towers_", ["text", "image"])
def test_only_the_tower_that_is_wanted_is_written(family: Shoal, triton: Triton, tmp_path: Path, towers_: str) -> None:
    (tmp_path / "clip").mkdir()
    config = configuration(tmp_path, triton)
    lines = [f'towers = "{towers_}"', config.read_text(), "[models.half]", 'backend = "triton"']
    config.write_text("\n".join([*lines, f'backends = ["file:{towers(tmp_path / "clip")}"]']))
    mine = list(TEXTS if towers_ == "text" else IMAGES)
    with shoal.open(config=config) as client:
        there = embedded(client, mine, "half")
        assert cosines(there.vectors, embedded(family, mine, "clip-here").vectors).min() >= 0.99999
    assert states(triton, "half") == ["READY", ""]
    triton.unload("half")
    shutil.rmtree(triton.repository / "half")


@pytest.mark.parametrize("pushed", [False, True])
def test_after_a_restart(own_triton: OwnTriton, tmp_path: Path, pushed: bool) -> None:
    """Triton dies and comes back without a model: both towers are loaded again. A new Shoal finds them in the
    folder."""
    triton = own_triton()
    more = {"triton_repository": ""} if pushed else {}
    config = configuration(tmp_path, triton, "clip", **more)
    with shoal.open(config=config) as client:
        before = embedded(client, mixed(), "clip")
        os.kill(triton.pid, signal.SIGKILL)
        after = when_available(lambda: embedded(client, mixed(), "clip"))
        np.testing.assert_allclose(after.vectors, before.vectors, rtol=1e-5, atol=1e-6)
    with shoal.open(config=config) as client:
        again = embedded(client, mixed(), "clip")
        np.testing.assert_allclose(again.vectors, before.vectors, rtol=1e-5, atol=1e-6)
    if not pushed:
        assert states(triton, "clip") == ["READY", "READY"]


@pytest.mark.parametrize("part", ["image", "text"])
async def test_a_tower_that_cannot_be_loaded_leaves_none(triton: Triton, tmp_path: Path, part: str) -> None:
    """One graph is invalid. New towers leave nothing behind, in the folder or loaded. Where old towers serve, Triton
    keeps both of them, or none."""
    settings = Settings(
        home=str(tmp_path / "home"),
        triton_url=triton.url,
        triton_repository=str(triton.repository),
        triton_platform="python",
    )
    (tmp_path / "clip").mkdir()
    address = parse_address(f"file:{towers(tmp_path / 'clip')}")
    stored = await asyncio.to_thread(prepare_local, address, settings)
    manifest = stored.manifest
    assert manifest.image is not None
    if part == "image":
        broken = structs.replace(manifest, image=structs.replace(manifest.image, graph="tokenizer.json"))
    else:
        broken = structs.replace(manifest, graph="tokenizer.json")
    tritons = TritonConnections(settings)
    try:
        host = TritonHost(settings, tritons)
        with pytest.raises(ModelFailed):
            await host.publish("half", replace(stored, manifest=broken), settings)
        assert "READY" not in await asyncio.to_thread(states, triton, "half")
        assert await host.find_entry("half") is None
        await host.publish("half", stored, settings)
        assert await asyncio.to_thread(states, triton, "half") == ["READY", "READY"]
        with pytest.raises(ModelFailed):
            await host.publish("half", replace(stored, manifest=broken), settings)
        state = "READY" if part == "image" else "UNAVAILABLE"
        assert await asyncio.to_thread(states, triton, "half") == [state, state]
        await host.unload("half", settings)
        assert await asyncio.to_thread(states, triton, "half") == ["UNAVAILABLE", "UNAVAILABLE"]
        assert await host.remove("half")
        assert not any(each.name.startswith("half") for each in triton.repository.iterdir())
    finally:
        await tritons.aclose()


def test_unloaded_and_deleted_together(triton: Triton, tmp_path: Path) -> None:
    """Through the model API, which does not list the image tower; an address of the whole server leaves it out."""
    (tmp_path / "clip").mkdir()
    address = f"pair=file:{towers(tmp_path / 'clip')}"
    place = ["--triton-url", triton.url, "--triton-repository", str(triton.repository), "--triton-platform", "python"]
    env = {"SHOAL_HOME": str(tmp_path / "home")}
    with serving(tmp_path / "one", [address], *place, env=env) as server:
        assert states(triton, "pair") == ["READY", "READY"]
        listed = [each["id"] for each in ask(server, "GET", "/models")[2]["data"]]
        assert "pair" in listed
        assert not any("~~" in name for name in listed)
        with serving(tmp_path / "two", [f"triton://{triton.url}"], env=env) as other:
            until(lambda: status_of(other, "pair") == "loaded", what="the offer")
            assert not any("~~" in each["id"] for each in ask(other, "GET", "/models")[2]["data"])
        assert ask(server, "POST", "/models/unload", {"model": "pair"})[0] == 200
        until(lambda: states(triton, "pair") == ["UNAVAILABLE", "UNAVAILABLE"], what="the unload")
        assert ask(server, "POST", "/models/load", {"model": "pair"})[0] == 200
        until(lambda: status_of(server, "pair") == "loaded", what="the load")
        assert states(triton, "pair") == ["READY", "READY"]
        stats = ask(server, "GET", "/metrics?format=json")[2]["model_stats"]
        assert {"pair/text_encoder", "pair/image_encoder"} <= {each["name"] for each in stats}
        assert ask(server, "DELETE", "/v1/models/pair", {})[0] == 200
        until(lambda: not (triton.repository / "pair").exists(), what="the deletion")
        assert not (triton.repository / "pair~~image").exists()
        assert "READY" not in states(triton, "pair")
