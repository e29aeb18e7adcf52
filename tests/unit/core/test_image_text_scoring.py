"""Scores of images against texts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shoal.core import image_text_scoring
from shoal.core.image_text_scoring import compute_scores, score_image_texts
from shoal.errors import EmptyInput, InvalidValue, ShoalError, UpstreamRefused
from shoal.specs import Activation, ContrastSpec
from shoal.types import Context, Embed, Embedded, Image

CTX = Context(id="r", deadline=1e12)
SOFTMAX = ContrastSpec(scale=100.0)
SIGMOID = ContrastSpec(scale=10.0, bias=-10.0, activation="sigmoid")
ANYTHING = arrays.arrays(np.float32, (4, 3), elements=st.floats(-1e6, 1e6, width=32))


class Eyes:
    """Knows the vectors of words and images, and records its calls."""

    def __init__(self, error: ShoalError | None = None) -> None:
        self.error = error
        self.calls: list[tuple[Embed, Context]] = []

    async def run(self, task: Embed, ctx: Context) -> Embedded:
        self.calls.append((task, ctx))
        if self.error is not None:
            raise self.error
        known = {"up": [0.0, 3.0], "right": [2.0, 0.0], "left": [-1.0, 0.0]}
        names = [each.data.decode() if isinstance(each, Image) else str(each) for each in task.inputs]
        return Embedded(vectors=np.array([known[name] for name in names], dtype=np.float32), tokens=[1] * len(names))


async def test_every_image_is_compared_with_every_text_in_one_task_and_in_order() -> None:
    eyes = Eyes()
    found = await score_image_texts(
        eyes.run, "m", [Image(b"right"), Image(b"up")], ["up", "right", "left"], CTX, SOFTMAX
    )
    assert found.cosine.tolist() == [[0.0, 1.0, -1.0], [1.0, 0.0, 0.0]]
    assert found.scores.argmax(axis=1).tolist() == [1, 0]
    assert found.embedded.tokens == [1] * 5
    assert eyes.calls == [
        (Embed(model="m", inputs=["up", "right", "left", Image(b"right"), Image(b"up")], normalize=True), CTX)
    ]


async def test_much_work_is_done_in_a_thread_and_little_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    real = image_text_scoring.compute_scores

    def watched(*args: object) -> object:
        threads.append(threading.current_thread())
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(image_text_scoring, "compute_scores", watched)
    few = await score_image_texts(Eyes().run, "m", [Image(b"up")], ["up", "left"], CTX, SOFTMAX)
    monkeypatch.setattr(image_text_scoring, "INLINE", 3)
    many = await score_image_texts(Eyes().run, "m", [Image(b"up")], ["up", "left"], CTX, SOFTMAX)
    assert [each is threading.main_thread() for each in threads] == [True, False]
    assert few.scores.tolist() == many.scores.tolist()


@pytest.mark.parametrize(("images", "texts"), [([], ["up"]), ([Image(b"up")], []), ([], [])])
async def test_one_of_each_is_needed(images: list[Image], texts: list[str]) -> None:
    eyes = Eyes()
    with pytest.raises(EmptyInput, match="at least one of each"):
        await score_image_texts(eyes.run, "m", images, texts, CTX, SOFTMAX)
    assert not eyes.calls


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("input 1: too long", "text 1: too long"),
        ("input 2: no picture", "image 0: no picture"),
        ("input 13: no picture", "image 11: no picture"),
        ("the model is tired", "the model is tired"),
    ],
)
async def test_an_error_names_the_text_or_the_image(message: str, named: str) -> None:
    error = InvalidValue(message, param="input")
    with pytest.raises(InvalidValue) as caught:
        await score_image_texts(Eyes(error).run, "m", [Image(b"up")] * 12, ["up", "left"], CTX, SOFTMAX)
    assert (caught.value.message, str(caught.value), caught.value.param) == (named, named, "input")
    assert error.message == message


async def test_an_error_about_no_input_is_passed_on_as_it_is() -> None:
    error = UpstreamRefused("input 0: no", status=418)
    with pytest.raises(UpstreamRefused) as caught:
        await score_image_texts(Eyes(error).run, "m", [Image(b"up")], ["up"], CTX, SOFTMAX)
    assert caught.value is error


def test_softmax_of_known_numbers() -> None:
    cosine, scores = compute_scores(_rows([1, 0]), _rows([1, 0], [3, 4], [0, 1]), ContrastSpec(scale=5.0))
    powers = np.exp([5.0, 3.0, 0.0])
    np.testing.assert_allclose(cosine, [[1.0, 0.6, 0.0]], atol=1e-7)
    np.testing.assert_allclose(scores, [powers / powers.sum()], rtol=1e-6)
    assert cosine.dtype == scores.dtype == np.dtype(np.float32)


def test_sigmoid_of_known_numbers() -> None:
    _, scores = compute_scores(_rows([1, 0]), _rows([1, 0], [0, 1], [-1, 0]), SIGMOID)
    np.testing.assert_allclose(scores, [[0.5, 1 / (1 + np.exp(10.0)), 1 / (1 + np.exp(20.0))]], rtol=1e-6)


def test_without_an_activation_the_scores_are_the_logits() -> None:
    _, scores = compute_scores(
        _rows([1, 0]), _rows([1, 0], [0, 1]), ContrastSpec(scale=4.0, bias=1.0, activation="identity")
    )
    assert scores.tolist() == [[5.0, 1.0]]


def test_a_vector_of_zeros_is_near_to_nothing() -> None:
    cosine, scores = compute_scores(_rows([0, 0]), _rows([1, 0], [0, 1]), SOFTMAX)
    assert (cosine.tolist(), scores.tolist()) == ([[0.0, 0.0]], [[0.5, 0.5]])


@given(ANYTHING, ANYTHING, st.floats(0.0, 1e6), st.sampled_from(["softmax", "sigmoid"]))
def test_whatever_the_vectors_the_scores_are_likelihoods(
    images: np.ndarray, texts: np.ndarray, scale: float, activation: Activation
) -> None:
    cosine, scores = compute_scores(images, texts, ContrastSpec(scale=scale, activation=activation))
    assert np.abs(cosine).max() <= 1.0
    assert scores.min() >= 0.0
    assert scores.max() <= 1.0
    if activation == "softmax":
        np.testing.assert_allclose(scores.sum(axis=1), 1.0, atol=1e-5)


def _rows(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)
