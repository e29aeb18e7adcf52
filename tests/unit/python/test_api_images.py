"""Images in the Python API, over the scripted model that takes them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as pillow

import shoal
from shoal import Image, Match
from shoal.backends.fake.model import compute_vector, tokenize_item
from shoal.errors import EmptyInput, InputRejected, InvalidValue, ModelNotFound, Unsupported, WrongType
from shoal.python.images import to_image
from shoal.types import Array, Item
from tests.unit.drawn import file_of

IMAGES = "fake:images=1"
RED = file_of("red")


def units(*items: Item) -> Array:
    rows = np.stack([compute_vector(tokenize_item(item), 32) for item in items])
    unit_rows: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit_rows


def scores(image: Image, texts: list[str]) -> tuple[Array, Array]:
    """Return the cosines, and the softmax over ten times of them."""
    cosines = (units(*texts) @ units(image).T)[:, 0]
    powers = np.exp(10 * cosines)
    return cosines, powers / powers.sum()


class TestEmbed:
    def test_texts_and_images_keep_their_order(self, tmp_path: Path) -> None:
        """In every form of an image."""
        path = tmp_path / "blue.png"
        path.write_bytes(file_of("blue"))
        drawn = pillow.open(path)
        written = to_image(drawn)
        assert isinstance(written, Image)
        with shoal.open(IMAGES) as s:
            rows = s.embed(["a b", path, RED, tokenize_item("c"), Image(RED), drawn])
            right = units("a b", Image(path.read_bytes()), Image(RED), "c", Image(RED), written)
            assert np.allclose(rows, right)
            assert np.allclose(asyncio.run(s.aembed([path, "a"])), right[[1]].tolist() + units("a").tolist())

    def test_tokens_are_the_texts(self) -> None:
        """More than one part; images have none."""
        with shoal.open(IMAGES) as s:
            rows = s.embed([RED, "a b"] * 400, outputs=["dense"])
            assert np.allclose(rows.vectors, np.tile(units(Image(RED), "a b"), (400, 1)))
            assert rows.tokens[1::2] == [2] * 400

    def test_a_text_model_refuses_images(self) -> None:
        with shoal.open("fake:") as s, pytest.raises(InvalidValue, match="accepts only text"):
            s.embed([RED])

    def test_a_missing_file_is_an_error(self, tmp_path: Path) -> None:
        with shoal.open(IMAGES) as s, pytest.raises(InvalidValue, match=r"no\.png cannot be read: No such file"):
            s.embed(["a", tmp_path / "no.png"])


class TestClassify:
    def test_images_have_labels(self) -> None:
        with shoal.open("fake:labels=3:images=1") as s:
            one, two = s.classify([RED, "a"])
            assert {each.label for each in one} == {"LABEL_0", "LABEL_1", "LABEL_2"}
            assert one != two
            assert s.classify([Image(RED)]) == [one]


class TestRank:
    def test_the_best_comes_first(self) -> None:
        texts = ["a", "b c", "d", "e"]
        with shoal.open(IMAGES) as s:
            ranking = s.rank(RED, texts)
            cosines, probabilities = scores(Image(RED), texts)
            assert [each.index for each in ranking] == np.argsort(-probabilities).tolist()
            assert [each.text for each in ranking] == [texts[each.index] for each in ranking]
            assert np.allclose(
                [each.score for each in ranking], probabilities[[each.index for each in ranking]], atol=1e-5
            )
            assert np.allclose([each.cosine for each in ranking], cosines[[each.index for each in ranking]], atol=1e-5)
            assert isinstance(ranking[0], Match)

    def test_one_softmax_over_a_list_of_any_length(self, tmp_path: Path) -> None:
        """Also if the list is split; asynchronously, from a file."""
        path = tmp_path / "red.png"
        path.write_bytes(RED)
        texts = [f"t{number}" for number in range(1100)]
        with shoal.open(IMAGES) as s:
            ranking = asyncio.run(s.arank(path, texts, model="fake"))
        _, probabilities = scores(Image(RED), texts)
        assert [each.text for each in ranking[:3]] == [texts[place] for place in np.argsort(-probabilities)[:3]]
        assert sum(each.score for each in ranking) == pytest.approx(1, abs=1e-4)

    @pytest.mark.parametrize(
        ("model", "image", "texts", "error", "words"),
        [
            (IMAGES, "red.png", ["a"], WrongType, "image must be .* a Path .*, not str"),
            (IMAGES, RED, "a", WrongType, "texts must be a list"),
            (IMAGES, RED, [b"a"], WrongType, r"texts\[0\] must be a string, not bytes"),
            (IMAGES, RED, [], EmptyInput, "at least one of each"),
            ("fake:", RED, ["a"], InvalidValue, "accepts only text"),
            ("fake:labels=2:images=1", RED, ["a"], ModelNotFound, "can embed"),
        ],
    )
    def test_inputs_that_cannot_be_compared(self, model: str, image: Any, texts: Any, error: type, words: str) -> None:
        with shoal.open(model) as s, pytest.raises(error, match=words):
            s.rank(image, texts)

    def test_a_model_that_only_labels_images(self) -> None:
        with shoal.open("fake:labels=2:images=1") as s, pytest.raises(Unsupported, match="name a CLIP or SigLIP"):
            s.rank(RED, ["a"], model="fake")

    def test_the_model_name_must_be_a_string(self) -> None:
        with shoal.open(IMAGES) as s, pytest.raises(WrongType, match="model must be str"):
            s.rank(RED, ["a"], model=None)  # type: ignore[arg-type]

    def test_an_error_names_the_text(self) -> None:
        with shoal.open(IMAGES) as s, pytest.raises(InputRejected, match=r"^text 600: "):
            s.rank(RED, ["a"] * 600 + ["reject-item"])
