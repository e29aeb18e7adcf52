"""Image-text models by open_clip's pair of model and checkpoint, and the requests in the original's README."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.backends.fake.model import FakeScript
from shoal.core.lane_runner import LaneRunner
from shoal.core.lifecycle.lifecycle import Entry, LoadOptions, Plan, ProgressReporter
from shoal.core.protocols import Runner
from shoal.http.fetching.allowed import FetchPolicy
from shoal.http.fetching.fetcher import Fetcher
from shoal.surfaces import ImageReader
from tests.surfaces.family_kit import DIMENSION, facts_of
from tests.surfaces.image_form_kit import BLUE, RED, close, inline, wanted
from tests.surfaces.life_kit import OTHER, Living, Scripted, living
from tests.surfaces.surface_kit import MODEL
from tests.unit.core.lanes import make_lane
from tests.unit.http.fetching.kit import Names, http, url, web

NAME, CHECKPOINT = "ViT-B-32", "laion2b_s34b_b79k"
PAIR = f"{NAME}/{CHECKPOINT}"
CHAT_BODY = {"model_name": NAME, "pretrained": CHECKPOINT}
TITLE = f"Model {NAME} with checkpoint {CHECKPOINT}"
LOADED = {"message": f"{TITLE} loaded successfully."}


class Clips(Scripted):
    """A loader whose models accept images if their name says so."""

    async def open(self, plan: Plan, report: ProgressReporter) -> Runner:
        if NAME not in plan.name:
            return await super().open(plan, report)
        self.options.append(plan.options)
        await self._work("open", plan.name)
        self.fetched.add(plan.name)
        script = FakeScript(images=1, dimension=DIMENSION)
        return LaneRunner(make_lane(script), facts_of(script))


async def say(life: Living, path: str, **fields: Any) -> Any:
    answer = await life.manage("POST", path, fields)
    assert answer.status == 200, answer.body
    return answer.json()


async def test_the_readme_of_the_original() -> None:
    """Its requests as printed, except for the images' host: load, infer three texts and two images, unload, delete."""
    async with web() as first, web() as second:
        first.answer, second.answer = http(RED), http(BLUE)
        allowed = FetchPolicy.parse(f"images.test:{first.port},images.test:{second.port}")
        reader = ImageReader(Fetcher(allowed, resolver=Names(["127.0.0.1"])))
        async with living(Clips(), image_reader=reader) as life:
            assert await say(life, "/load_clip_model", model_name="ViT-B-32", pretrained="laion2b_s34b_b79k") == LOADED
            texts = ["I am a sentence.", "I am another sentence.", "I am a third sentence."]
            body = {
                "model_name": "ViT-B-32",
                "pretrained": "laion2b_s34b_b79k",
                "text": texts,
                "image": [url(first, "images.test", "/image1.jpg"), url(second, "images.test", "/image2.jpg")],
            }
            answer = await life.call("POST", "/infer", body)
            assert answer.status == 200, answer.body
            assert list(answer.json()) == ["text_embeddings", "image_embeddings", "processingTimeMs"]
            close(answer.json()["text_embeddings"], [wanted(text) for text in texts])
            close(answer.json()["image_embeddings"], [wanted(RED), wanted(BLUE)])
            unloaded = {"message": f"{TITLE} unloaded successfully."}
            assert await say(life, "/unload_model", model_name="ViT-B-32", pretrained="laion2b_s34b_b79k") == unloaded
            assert (await life.call("POST", "/infer", body)).status == 400
            deleted = {"message": f"{TITLE} deleted successfully."}
            assert await say(life, "/delete_model", model_name="ViT-B-32", pretrained="laion2b_s34b_b79k") == deleted


async def test_load() -> None:
    """The pair is the name; a second load reports that it is already loaded. Both lists show it."""
    async with living(Clips(listed=[Entry(name=PAIR, source=f"hf:{PAIR}", backend="local")])) as life:
        assert await say(life, "/load_clip_model", **CHAT_BODY) == LOADED
        assert await say(life, "/load_clip_model", **CHAT_BODY) == {"message": f"{TITLE} is already loaded."}
        assert (await life.call("GET", "/loaded_models")).json() == {"models": [MODEL, PAIR]}
        models = (await life.call("GET", "/repository_models")).json()["models"]
        assert {"name": PAIR, "state": "READY"} in models


@pytest.mark.parametrize("pretrained", [{}, {"pretrained": None}, {"pretrained": ""}])
async def test_load_without_a_checkpoint(pretrained: Any) -> None:
    """The model has its own name, and the message says None, like the original's."""
    async with living(Clips()) as life:
        loaded = {"message": f"Model {OTHER} with checkpoint {pretrained.get('pretrained')} loaded successfully."}
        assert await say(life, "/load_clip_model", model_name=OTHER, **pretrained) == loaded
        assert life.lifecycle.jobs()[-1].model == OTHER


@pytest.mark.parametrize("prefix", ["hf-hub:", "hf_hub:"])
async def test_open_clip_prefixes(prefix: str) -> None:
    """The prefix is not part of the repository's name, on every route."""
    async with living(Clips()) as life:
        await say(life, "/load_clip_model", model_name=prefix + OTHER)
        assert life.lifecycle.jobs()[-1].model == OTHER
        answer = await life.call("POST", "/infer_text", {"model_name": prefix + OTHER, "text": "a"})
        assert answer.status == 200
        unloaded = {"message": f"Model {prefix}{OTHER} with checkpoint None unloaded successfully."}
        assert await say(life, "/unload_model", model_name=prefix + OTHER) == unloaded


async def test_a_model_of_any_kind() -> None:
    """/load_model, the newer path, accepts any library name; a checkpoint is optional."""
    async with living(Clips()) as life:
        loaded = {"message": f"Model {OTHER} loaded successfully."}
        assert await say(life, "/load_model", name=OTHER, library="sentence_transformers", backend="triton") == loaded
        assert await say(life, "/load_model", name=OTHER, library="x") == {
            "message": f"Model {OTHER} is already loaded."
        }
        assert life.loader.options == [LoadOptions(backend="triton")]
        assert await say(life, "/load_model", name=NAME, pretrained=CHECKPOINT) == LOADED


@pytest.mark.parametrize("names", [(NAME, "a/b"), ("org/name", "c"), (NAME, ".."), ("..", CHECKPOINT), (NAME, "ä")])
async def test_invalid_pairs(names: tuple[str, str]) -> None:
    """400, before anything is looked up."""
    async with living(Clips()) as life:
        answer = await life.manage("POST", "/load_clip_model", {"model_name": names[0], "pretrained": names[1]})
        assert (answer.status, "is not a model's name" in answer.json()["detail"]) == (400, True)
        assert life.loader.touched == []


async def test_only_admins_load() -> None:
    """Both new paths require the admin key."""
    async with living(Clips(), api_key=("k",), admin_key=("a",)) as life:
        for path in ("/load_clip_model", "/load_model"):
            assert (await life.manage("POST", path, CHAT_BODY)).status == 401
            answer = await life.call("POST", path, CHAT_BODY, headers={"authorization": "Bearer k"})
            assert answer.status == 403
        answer = await life.call("POST", "/load_clip_model", CHAT_BODY, headers={"authorization": "Bearer a"})
        assert answer.status == 200


async def test_the_pair_and_the_name_are_different_models() -> None:
    """Each request uses the model that it names; if only the bare name is served, it stands for every checkpoint."""
    async with living(Clips()) as life:
        await say(life, "/load_clip_model", **CHAT_BODY)
        body = {"image": inline(RED)}
        assert (await life.call("POST", "/infer_image", {**CHAT_BODY, **body})).status == 200
        answer = await life.call("POST", "/infer_image", {"model_name": NAME, **body})
        detail = f"Model {NAME} with checkpoint None is not loaded. Load the model first using /load_model."
        assert (answer.status, answer.json()) == (400, {"detail": detail})
        await say(life, "/load_clip_model", model_name=NAME)
        answer = await life.call("POST", "/infer_image", {"model_name": NAME, "pretrained": "openai", **body})
        assert answer.status == 200
        await say(life, "/unload_model", **CHAT_BODY)
        assert (await life.call("GET", "/loaded_models")).json() == {"models": [MODEL, NAME]}
        await say(life, "/unload_model", model_name=NAME, pretrained="openai")
        assert (await life.call("GET", "/loaded_models")).json() == {"models": [MODEL]}


async def test_delete_a_model_that_is_not_loaded() -> None:
    """The pair's files are deleted; without any, the bare name is meant."""
    entries = [Entry(name=PAIR, source=f"hf:{PAIR}", backend="local")]
    async with living(Clips(listed=entries)) as life:
        await say(life, "/delete_model", **CHAT_BODY)
        await say(life, "/delete_model", model_name=NAME, pretrained="openai")
        assert life.loader.touched == [("remove", PAIR), ("remove", NAME)]
