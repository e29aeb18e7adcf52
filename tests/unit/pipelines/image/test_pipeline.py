"""The Pipeline of an image tower: the shared contract and image-specific behavior."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from shoal.core.protocols import BoundedPipeline, EngineFacts, Pipeline, Prepared
from shoal.errors import InvalidValue, ShoalError, Unsupported
from shoal.pipelines.image import ImagePipeline
from shoal.pipelines.image.budget import Budget
from shoal.pipelines.image.pipeline import COST
from shoal.pipelines.image.preprocessing import Preprocessing
from shoal.specs import ScoreSpec
from shoal.types import Array, Classify, Embed, Image, Item, Rerank
from tests.contract.pipelines.contract import VectorContract
from tests.unit.pipelines.image.image_kit import CLIP, SIGLIP, broken, drawn, image_files, saved

SPEC = msgspec.structs.replace(CLIP, size=(32, 32), crop=(32, 32), edge=32)
FACTS = EngineFacts(name="images", inputs=("pixel_values",), outputs=("image_embeds",), size_buckets=(1, 2, 4, 8))
ITEMS = [Image(image_files()[name]) for name in ("odd", "alpha", "CMYK", "EXIF 6", "odd")]


def embed(**fields: Any) -> Embed:
    return Embed(model="m", inputs=[], **fields)


class TestContract(VectorContract):
    """The contract with images instead of texts; tests of lengths and threads are redefined for them."""

    items: ClassVar[list[Item]] = list(ITEMS)
    good: ClassVar[tuple[Item, Item]] = (ITEMS[1], ITEMS[2])
    padded = False

    @pytest.fixture
    def pipeline(self) -> Pipeline:
        return ImagePipeline(SPEC)

    @pytest.fixture
    def facts(self) -> EngineFacts:
        return FACTS

    @pytest.fixture
    def width(self) -> int:
        return SPEC.dimension

    @pytest.fixture
    def bad(self) -> Item:
        return Image(broken()["half a JPEG"])

    def test_prepared_items_are_whole(self, pipeline: Pipeline) -> None:
        """One array of the model's size; all items have the same cost."""
        for item in self.prepared(pipeline, self.items):
            assert (item.cost, item.tokens, item.truncated) == (COST, 0, False)
            assert item.outputs == ("image_embeds",)
            (values,) = item.tensors.values()
            assert values.shape == (3, 32, 32)
            assert values.dtype == np.float32
            assert isinstance(hash((item.group, item.key)), int)

    def test_threads_may_share_it(self, pipeline: Pipeline) -> None:
        """Concurrent calls from several threads get the same results as one."""

        def sums(job: list[Item]) -> list[float]:
            return [float(p.tensors["pixel_values"].sum()) for p in self.prepared(pipeline, job)]

        jobs: list[list[Item]] = [[Image(data), *self.items] for data in list(image_files().values())[:12]]
        alone = [sums(job) for job in jobs]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(sums, jobs)) == alone


@pytest.mark.parametrize("spec", [CLIP, SIGLIP])
def test_a_batch_holds_the_pixels_of_each(spec: Any) -> None:
    """The order is kept, missing rows are zeros, and pixels are those of the preprocessing alone."""
    pipeline, steps = ImagePipeline(spec), Preprocessing(spec)
    batch = [
        entry for entry in pipeline.prepare([(embed(), item) for item in ITEMS[:3]]) if isinstance(entry, Prepared)
    ]
    values = pipeline.collate(batch, FACTS)["pixel_values"]
    assert values.shape == (4, 3, 224, 224)
    for row, item in zip(values, ITEMS[:3], strict=False):
        np.testing.assert_array_equal(row, steps.values(steps.pixels(item.data)))
    assert not values[3].any()


def test_every_bad_image_has_its_own_error() -> None:
    """The error holds no frames, so no image data stays in memory."""
    pipeline = ImagePipeline(SPEC)
    files = [data for pair in zip(broken().values(), image_files().values(), strict=False) for data in pair]
    entries = pipeline.prepare([(embed(), Image(data)) for data in files])
    for number, entry in enumerate(entries):
        if number % 2:
            assert isinstance(entry, Prepared)
        else:
            assert isinstance(entry, InvalidValue)
            assert entry.__traceback__ is None
            assert entry.__context__ is None


def test_identical_images_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one call; a duplicate with other options has another key and the same pixels."""
    pipeline, calls = ImagePipeline(SPEC), list[bytes]()
    real = pipeline._preprocessing.pixels

    def counted(data: bytes, budget: Any) -> Array:
        calls.append(data)
        return real(data, budget)

    monkeypatch.setattr(pipeline._preprocessing, "pixels", counted)
    items = [(embed(), Image(saved(drawn(40, 30), "PNG"))) for _ in range(3)]
    items.append((embed(dimensions=3), items[0][1]))
    entries = pipeline.prepare([*items, *[(embed(), Image(b"junk"))] * 2])
    assert len(calls) == 2
    keys = [entry.key for entry in entries if isinstance(entry, Prepared)]
    assert keys[0] == keys[1] == keys[2] != keys[3]
    assert entries[0].tensors["pixel_values"] is entries[3].tensors["pixel_values"]  # type: ignore[union-attr]


@pytest.mark.parametrize("role", ["query", "document"])
def test_a_role_changes_nothing(role: str) -> None:
    """As for a model without prompts; Cohere and NIM clients must send a role and a truncation."""
    pipeline = ImagePipeline(SPEC)
    pipeline.check(embed(input_type=role, truncate=True))
    one, other = pipeline.prepare([(embed(input_type=role, truncate=False), ITEMS[0]), (embed(), ITEMS[0])])
    assert isinstance(one, Prepared)
    assert isinstance(other, Prepared)
    assert one.key == other.key


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_name": "query"}, "prompt_name"),
        ({"outputs": ("sparse",)}, "model"),
        ({"outputs": ("dense", "multi")}, "model"),
    ],
)
def test_text_options_are_refused_for_images(fields: dict[str, Any], param: str) -> None:
    """By `check`, and by `prepare` in the place of the items; the error states the next step."""
    pipeline = ImagePipeline(SPEC)
    with pytest.raises(Unsupported, match=r"omit|request") as caught:
        pipeline.check(embed(**fields))
    assert caught.value.param == param
    assert isinstance(pipeline.prepare([(embed(**fields), ITEMS[0])])[0], Unsupported)


@pytest.mark.parametrize("task", [Classify(model="m", inputs=["a"]), Rerank(model="m", queries=["a"], documents=["b"])])
def test_other_tasks_are_refused(task: Any) -> None:
    """They are for texts only."""
    with pytest.raises(Unsupported, match="only embeds images; request"):
        ImagePipeline(SPEC).check(task)


@pytest.mark.parametrize("item", ["a text", [1, 2], ("a", "b")])
def test_texts_are_refused(item: Item) -> None:
    """Each text gets its own error."""
    (entry,) = ImagePipeline(SPEC).prepare([(embed(), item)])
    assert isinstance(entry, InvalidValue)
    assert entry.param == "input"


def test_the_operator_may_keep_vectors_as_they_are() -> None:
    """The setting overrides requests. The work is heavy: decoding takes long and releases the GIL."""
    rows = np.full((1, SPEC.dimension), 2.0, dtype=np.float32)
    lengths: list[float] = []
    for normalize in (None, True, False):
        pipeline = ImagePipeline(SPEC, normalize=normalize)
        batch = [entry for entry in pipeline.prepare([(embed(), ITEMS[0])]) if isinstance(entry, Prepared)]
        (row,) = pipeline.finish({"image_embeds": rows}, batch)
        assert not isinstance(row, ShoalError)
        lengths.append(float(np.linalg.norm(np.asarray(row))))
        assert pipeline.work == "heavy"
    assert lengths == pytest.approx([1, 1, 4 * 2**0.5])


def test_prepared_images_count_until_nothing_holds_them() -> None:
    """Each counts twice, for its place in a batch; broken files leave nothing lent, and duplicates cost nothing
    more."""
    budget = Budget(64 * 2**20)
    pipeline = ImagePipeline(SPEC, budget=budget)
    size = 2 * 4 * 3 * 32 * 32
    entries = pipeline.prepare(
        [(embed(), item) for item in (ITEMS[0], ITEMS[1], ITEMS[0], Image(broken()["half a JPEG"]))]
    )
    assert isinstance(entries[3], ShoalError)
    assert budget._free == budget.total - 2 * size
    batch = pipeline.collate([entry for entry in entries if isinstance(entry, Prepared)], FACTS)
    assert batch["pixel_values"].shape == (4, 3, 32, 32)
    del entries[1]
    assert budget._free == budget.total - size
    del entries
    assert budget._free == budget.total


def test_a_model_holds_half_of_the_budget() -> None:
    """The other half is for other models; a larger image is still accepted alone."""
    size = 2 * 4 * 3 * 32 * 32
    assert ImagePipeline(SPEC, budget=Budget(20 * size)).max_held_items == 10
    assert ImagePipeline(SPEC, budget=Budget(size)).max_held_items == 1
    assert isinstance(ImagePipeline(SPEC), BoundedPipeline)


def test_a_bug_gives_the_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is returned whatever is raised after decoding."""
    budget = Budget(64 * 2**20)
    pipeline = ImagePipeline(SPEC, budget=budget)

    def broken_values(pixels: Array) -> Array:
        raise ZeroDivisionError

    monkeypatch.setattr(pipeline._preprocessing, "values", broken_values)
    with pytest.raises(ZeroDivisionError):
        pipeline.prepare([(embed(), ITEMS[0])])
    assert budget._free == budget.total


SCORES = msgspec.structs.replace(
    SPEC, dimension=0, output="logits", score=ScoreSpec(labels=("a", "b"), activation="softmax", pairs=False)
)


def test_a_classifiers_rows_are_scores() -> None:
    """Activated and raw scores share a batch."""
    pipeline = ImagePipeline(SCORES)
    tasks = [Classify(model="m", inputs=[], raw_scores=raw) for raw in (False, True)]
    for task in tasks:
        pipeline.check(task)
    batch = [entry for entry in pipeline.prepare([(task, ITEMS[0]) for task in tasks]) if isinstance(entry, Prepared)]
    assert batch[0].key != batch[1].key
    assert batch[0].outputs == ("logits",)
    rows: Any = pipeline.finish({"logits": np.array([[0.0, 2.0], [0.0, 2.0], [9.0, 9.0]], np.float32)}, batch)
    assert np.allclose(rows[0], [1 / (1 + np.exp(2)), 1 / (1 + np.exp(-2))])
    assert np.array_equal(rows[1], [0.0, 2.0])


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Embed(model="m", inputs=[]), "only classifies images; request"),
        (Rerank(model="m", queries=["q"], documents=["d"]), "only classifies images; request"),
    ],
)
def test_a_classifier_does_nothing_else(task: Any, message: str) -> None:
    """It has no vectors."""
    with pytest.raises(Unsupported, match=message):
        ImagePipeline(SCORES).check(task)
