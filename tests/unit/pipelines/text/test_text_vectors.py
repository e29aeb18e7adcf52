"""Vectors besides the dense one: sparse, late-interaction and token vectors; and models of static vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.protocols import EngineFacts, Prepared, VectorSet
from shoal.errors import InvalidValue, NotFinite, ShoalError, TooLong, Unsupported
from shoal.pipelines.outputs import weights_by_id
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import MultiSpec, SparseSpec
from shoal.types import Array, Embed, TextItem, VectorKind
from tests.unit.pipelines import tiny_tokenizers
from tests.unit.pipelines.tiny_tokenizers import spec

FACTS = EngineFacts(name="e", inputs=(), outputs=())
PROMPTS = {"query": "query: ", "passage": "passage: "}
RAW = tiny_tokenizers.wordpiece()
CLS, SEP, UNK, FOX, DOG, THE, COMMA = (
    RAW.get_vocab()[token] for token in ("[CLS]", "[SEP]", "[UNK]", "fox", "dog", "the", ",")
)
ALL: tuple[VectorKind, ...] = ("dense", "sparse", "multi", "tokens")
BGE = {
    "sparse": SparseSpec(output="weights", per="token", skipped=(CLS, SEP)),
    "multi": MultiSpec(dimension=3, drop_first=True),
    "tokens": "token_embeddings",
}
COLBERT = MultiSpec(
    dimension=3,
    query_marker=90,
    document_marker=91,
    query_length=8,
    document_length=10,
    fill_id=92,
    skipped=(COMMA,),
)
OUTPUTS = {"dense": "pooled", "sparse": "weights", "multi": "multi_vectors", "tokens": "token_embeddings"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.save(RAW, tmp_path_factory.mktemp("vectors"))


def made(folder: Path, **fields: Any) -> TextPipeline:
    return TextPipeline(folder, spec(**fields), truncate=True)


def embed(*outputs: VectorKind, **fields: Any) -> Embed:
    return Embed(model="m", inputs=[], outputs=outputs or ("dense",), **fields)


def one(pipeline: TextPipeline, item: TextItem, task: Embed) -> Prepared:
    prepared = pipeline.prepare([(task, item)])[0]
    assert isinstance(prepared, Prepared), prepared
    return prepared


def ids(prepared: Prepared) -> list[int]:
    tensor: list[int] = prepared.tensors["input_ids"].tolist()
    return tensor


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(0.1, 1, size=shape).astype(np.float32)


def answered(rows: int, length: int) -> dict[str, Array]:
    """Outputs of a graph with every head."""
    return {
        "pooled": numbers(rows, 8),
        "weights": numbers(rows, length, seed=1),
        "multi_vectors": numbers(rows, length, 3, seed=2),
        "token_embeddings": numbers(rows, length, 8, seed=3),
    }


def a_set(pipeline: TextPipeline, prepared: Prepared, outputs: dict[str, Array]) -> VectorSet:
    (row,) = pipeline.finish(outputs, [prepared])
    assert isinstance(row, VectorSet), row
    return row


class TestOutputs:
    @given(kinds=st.lists(st.sampled_from(ALL), min_size=1, max_size=4, unique=True).map(tuple))
    def test_an_item_needs_the_outputs_of_its_kinds(self, folder: Path, kinds: tuple[VectorKind, ...]) -> None:
        """An item requests no other outputs and waits for no large output it does not need."""
        pipeline = made(folder, **BGE)
        pipeline.check(embed(*kinds))
        prepared = one(pipeline, "the fox", embed(*kinds))
        assert set(prepared.outputs) == {OUTPUTS[kind] for kind in kinds}
        large = {"multi_vectors", "token_embeddings"} & set(prepared.outputs)
        assert set(prepared.group) == large  # type: ignore[call-overload]
        row = pipeline.finish(answered(1, 4), [prepared])[0]
        if kinds == ("dense",):
            assert isinstance(row, np.ndarray)
            return
        assert isinstance(row, VectorSet)
        assert {kind for kind in ALL if getattr(row, kind) is not None} == set(kinds)

    def test_weights_of_the_vocabulary_are_large(self, folder: Path) -> None:
        """One weight for each vocabulary entry."""
        pipeline = made(folder, sparse=SparseSpec())
        assert one(pipeline, "a", embed("sparse")).group == ("sparse_embedding",)
        assert one(pipeline, "a", embed()).group == ()

    def test_kinds_share_a_batch(self, folder: Path) -> None:
        """A plain item keeps its dense vectors next to one that requests more kinds."""
        pipeline = made(folder, **BGE)
        batch = [one(pipeline, "the fox", embed()), one(pipeline, "the fox", embed("sparse", "dense"))]
        outputs = answered(2, 4)
        plain, other = pipeline.finish(outputs, batch)
        assert isinstance(plain, np.ndarray)
        assert isinstance(other, VectorSet)
        np.testing.assert_allclose(plain, outputs["pooled"][0] / np.linalg.norm(outputs["pooled"][0]), rtol=1e-6)
        assert other.dense is not None
        assert np.linalg.norm(other.dense) == pytest.approx(1.0)
        assert other.multi is None

    def test_a_model_of_token_vectors_gives_them_too(self, folder: Path) -> None:
        """The pooled output already holds all token vectors, so both kinds of items share a batch."""
        pipeline = made(folder, pooled="token_embeddings", tokens="token_embeddings")
        prepared = one(pipeline, "the fox", embed("dense", "tokens"))
        assert (prepared.outputs, prepared.group) == (("token_embeddings",), ())
        tokens = numbers(1, 6, 8)
        row = a_set(pipeline, prepared, {"token_embeddings": tokens})
        assert row.tokens is not None
        assert row.dense is not None
        np.testing.assert_array_equal(row.tokens, tokens[0, :4])
        mean = tokens[0, :4].mean(axis=0)
        np.testing.assert_allclose(row.dense, mean / np.linalg.norm(mean), rtol=1e-5)

    def test_kinds_that_the_model_lacks(self, folder: Path) -> None:
        """The error lists the available kinds, also for dense vectors and in the place of the items."""
        pipeline = made(folder, dimension=0, sparse=SparseSpec())
        for kind in ("dense", "multi", "tokens"):
            with pytest.raises(Unsupported, match=f"no {kind} vectors; it has: sparse"):
                pipeline.check(embed(kind))
            assert isinstance(pipeline.prepare([(embed(kind), "a")])[0], Unsupported)
        pipeline.check(embed("sparse"))

    def test_options_of_dense_vectors_do_not_affect_others(self, folder: Path) -> None:
        """They are neither refused nor part of the key."""
        pipeline = made(folder, **BGE)
        pipeline.check(embed("sparse", dimensions=99))
        plain, cut = (one(pipeline, "a", embed("sparse", **f)) for f in ({}, {"dimensions": 4, "normalize": False}))
        assert plain.key == cut.key
        with pytest.raises(InvalidValue):
            pipeline.check(embed("sparse", "dense", dimensions=99))

    def test_keys_tell_kinds_apart(self, folder: Path) -> None:
        """Each set of kinds, and each side of a late interaction, has its own key."""
        pipeline = made(folder, **BGE)
        tasks = [embed(*kinds) for kinds in (("dense",), ("sparse",), ("dense", "sparse"), ("multi",))]
        keys = {one(pipeline, "a", task).key for task in [*tasks, embed("multi", input_type="query")]}
        assert len(keys) == 5
        assert one(pipeline, "a", embed()).key == one(pipeline, "a", embed(input_type="query")).key

    @pytest.mark.parametrize("kind", ALL)
    def test_an_item_whose_vectors_are_no_numbers_fails_alone(self, folder: Path, kind: VectorKind) -> None:
        """Also if its other kinds are finite; NaN in padding is ignored."""
        pipeline = made(folder, **BGE)
        outputs = answered(2, 6)
        for name in ("weights", "multi_vectors", "token_embeddings"):
            outputs[name][:, 4:] = np.nan
        outputs[OUTPUTS[kind]][0, 1] = np.nan
        bad, fine = pipeline.finish(outputs, [one(pipeline, "the fox", embed(*ALL))] * 2)
        assert isinstance(bad, NotFinite)
        assert isinstance(fine, VectorSet)


class TestTokens:
    def test_every_token_that_was_read(self, folder: Path) -> None:
        """Special tokens included, padding excluded, unnormalized, in float32, and not a view of the batch."""
        pipeline = made(folder, tokens="token_embeddings")
        tokens = numbers(2, 9, 8).astype(np.float16)
        row = a_set(pipeline, one(pipeline, "the fox", embed("tokens")), {"token_embeddings": tokens})
        assert row.tokens is not None
        np.testing.assert_array_equal(row.tokens, tokens[0, :4].astype(np.float32))
        assert row.tokens.dtype == np.float32
        assert row.tokens.base is None


class TestSparse:
    def test_of_the_vocabulary(self, folder: Path) -> None:
        """Non-zero weights in the order of their ids."""
        pipeline = made(folder, dimension=0, sparse=SparseSpec())
        weights = np.zeros((1, 50), dtype=np.float16)
        weights[0, [40, 3, 17]] = 1, 2, 3
        row = a_set(pipeline, one(pipeline, "a", embed("sparse")), {"sparse_embedding": weights})
        assert row.sparse is not None
        assert (row.sparse.indices.tolist(), row.sparse.values.tolist()) == ([3, 17, 40], [2, 3, 1])
        assert row.sparse.indices.dtype == np.int32
        assert row.sparse.values.dtype == np.float32

    @pytest.mark.parametrize("axis", [False, True])
    def test_of_tokens(self, folder: Path, axis: bool) -> None:
        """The largest weight of each id without special tokens and zeros; padding has no weight."""
        pipeline = made(folder, **BGE)
        prepared = one(pipeline, "the fox the dog", embed("sparse"))
        weights = np.array([[9, 0.5, 0.25, 0.75, 0, 9, 7, 7]], dtype=np.float32)
        row = a_set(pipeline, prepared, {"weights": weights[..., None] if axis else weights})
        assert row.sparse is not None
        assert dict(zip(row.sparse.indices.tolist(), row.sparse.values.tolist(), strict=True)) == {FOX: 0.25, THE: 0.75}

    @given(
        pairs=st.lists(st.tuples(st.integers(0, 8), st.floats(-1, 4, width=32)), max_size=20),
        skipped=st.sets(st.integers(0, 8), max_size=3),
    )
    def test_the_largest_weight_of_each_id(self, pairs: list[tuple[int, float]], skipped: set[int]) -> None:
        """The result equals that of a dictionary."""
        expected: dict[int, float] = {}
        for token, weight in pairs:
            if weight > 0 and token not in skipped:
                expected[token] = max(weight, expected.get(token, 0))
        tokens = np.array([token for token, _ in pairs], dtype=np.int64)
        weights = np.array([weight for _, weight in pairs], dtype=np.float32)
        sparse = weights_by_id(tokens, weights, np.array(sorted(skipped), dtype=np.int64))
        assert dict(zip(sparse.indices.tolist(), sparse.values.tolist(), strict=True)) == expected
        assert sparse.indices.tolist() == sorted(expected)


class TestLateInteraction:
    @pytest.fixture
    def colbert(self, folder: Path) -> TextPipeline:
        inputs = ("input_ids", "attention_mask", "position_ids")
        return made(folder, dimension=0, multi=COLBERT, prompts=PROMPTS, inputs=inputs, tokens="token_embeddings")

    def test_queries_are_marked_and_filled(self, colbert: TextPipeline) -> None:
        """Queries are filled up to their length; filler tokens are not attended and not counted, but have vectors."""
        prepared = one(colbert, "fox", embed("multi", input_type="query"))
        query, colon = RAW.get_vocab()["query"], RAW.get_vocab()[":"]
        assert ids(prepared) == [CLS, 90, query, colon, FOX, SEP, 92, 92]
        assert (prepared.cost, prepared.tokens, prepared.truncated) == (8, 6, False)
        tensors = colbert.collate([prepared], FACTS)
        assert tensors["attention_mask"].tolist() == [[1] * 6 + [0] * 2]
        assert tensors["position_ids"].tolist() == [list(range(8))]
        outputs = answered(1, 8)
        row = a_set(colbert, prepared, outputs)
        assert row.multi is not None
        np.testing.assert_array_equal(row.multi, outputs["multi_vectors"][0])
        both = a_set(colbert, one(colbert, "fox", embed("tokens", input_type="query")), outputs)
        assert both.tokens is not None
        assert both.tokens.shape == (6, 8)

    def test_query_filler_tokens_may_be_attended(self, folder: Path) -> None:
        """For models that were trained this way."""
        multi = MultiSpec(dimension=3, query_length=6, fill_id=92, attended=True)
        pipeline = made(folder, dimension=0, multi=multi)
        prepared = one(pipeline, "fox", embed("multi", input_type="query"))
        assert ids(prepared) == [CLS, FOX, SEP, 92, 92, 92]
        assert pipeline.collate([prepared], FACTS)["attention_mask"].tolist() == [[1] * 6]
        assert ids(one(pipeline, "fox", embed("multi"))) == [CLS, FOX, SEP]

    @pytest.mark.parametrize("role", ["document", None])
    def test_documents_are_marked_and_lose_skipped_tokens(self, colbert: TextPipeline, role: str | None) -> None:
        """Only their vectors are dropped: the model still reads the tokens. A text without a role is a document."""
        prepared = one(colbert, "fox, dog", embed("multi", input_type=role))
        head = [CLS, 91, *(RAW.encode("passage:", add_special_tokens=False).ids if role else [])]
        assert ids(prepared) == [*head, FOX, COMMA, DOG, SEP]
        assert prepared.tokens == prepared.cost == len(head) + 4
        outputs = answered(1, 12)
        row = a_set(colbert, prepared, outputs)
        assert row.multi is not None
        places = [place for place in range(len(head) + 4) if place != len(head) + 1]
        np.testing.assert_array_equal(row.multi, outputs["multi_vectors"][0, places])

    def test_a_querys_own_skipped_tokens_stay(self, colbert: TextPipeline) -> None:
        """Only documents skip tokens."""
        row = a_set(colbert, one(colbert, "fox,", embed("multi", input_type="query")), answered(1, 8))
        assert row.multi is not None
        assert row.multi.shape == (8, 3)

    @pytest.mark.parametrize(("role", "length"), [("query", 8), ("document", 10)])
    @pytest.mark.parametrize("direction", ["left", "right"])
    def test_each_side_has_its_own_length(self, colbert: TextPipeline, role: str, length: int, direction: str) -> None:
        """Marker and special tokens count; the error names the side."""
        task = embed("multi", input_type=role, truncation_direction=direction)
        prepared = one(colbert, "fox " * 20, task)
        marker = 90 if role == "query" else 91
        assert prepared.truncated
        assert len(ids(prepared)) == length
        assert ids(prepared)[:2] == [CLS, marker]
        assert ids(prepared)[-2:] == [FOX, SEP]
        answer = colbert.prepare([(embed("multi", input_type=role, truncate=False), "fox " * 20)])[0]
        assert isinstance(answer, TooLong)
        assert f"has 25 tokens, but the model accepts at most {length}; " in answer.message
        # Dialects have true, "END" and other words for it: a value would be wrong in some of them.
        assert answer.message.endswith("shorten it, or set truncate")

    def test_sides_stand_side_by_side_in_a_job(self, colbert: TextPipeline) -> None:
        """Results and errors keep the order of the items."""
        query, document = embed("multi", input_type="query"), embed("multi")
        items: list[tuple[Embed, TextItem]] = [(document, "fox"), (query, "dog"), (query, "\ud800"), (document, "the")]
        answers = colbert.prepare([*items, (query, [5, 6])])
        assert [isinstance(answer, ShoalError) for answer in answers] == [False, False, True, False, True]
        for (task, item), answer in zip(items, answers, strict=False):
            if isinstance(answer, Prepared):
                assert answer.key == one(colbert, item, task).key

    def test_token_ids_are_read_as_they_are(self, folder: Path) -> None:
        """Ids get neither marker nor filler tokens."""
        pipeline = made(folder, dimension=0, multi=COLBERT)
        prepared = one(pipeline, [CLS, FOX], embed("multi", input_type="query"))
        assert (ids(prepared), prepared.tokens) == ([CLS, FOX], 2)
        assert len(ids(one(pipeline, [FOX] * 12, embed("multi")))) == 10

    def test_the_first_vector_may_be_left_out(self, folder: Path) -> None:
        """For queries and documents alike, as in bge-m3, whose sides differ in nothing else."""
        pipeline = made(folder, **BGE)
        outputs = answered(1, 5)
        for role in ("query", "document"):
            prepared = one(pipeline, "the fox", embed("multi", input_type=role))
            assert ids(prepared) == [CLS, THE, FOX, SEP]
            row = a_set(pipeline, prepared, outputs)
            assert row.multi is not None
            np.testing.assert_array_equal(row.multi, outputs["multi_vectors"][0, 1:4])

    def test_a_filled_query_is_not_the_text_that_looks_like_it(self, folder: Path) -> None:
        """Filler tokens are not attended; the same tokens in a text are."""
        pipeline = made(folder, dimension=0, multi=MultiSpec(dimension=3, query_length=4, fill_id=FOX))
        task = embed("multi", input_type="query")
        filled, literal = one(pipeline, "dog", task), one(pipeline, [CLS, DOG, SEP, FOX], task)
        assert ids(filled) == ids(literal)
        assert filled.key != literal.key


class TestStatic:
    @pytest.fixture
    def static(self, folder: Path) -> TextPipeline:
        return made(folder, frame_tokens=False, dropped=(UNK,))

    def test_special_and_dropped_tokens_are_left_out(self, static: TextPipeline) -> None:
        """They are removed before a text is counted or cut."""
        assert ids(one(static, "the слово fox", embed())) == [THE, FOX]
        prepared = one(static, "слово fox " * 20, embed())
        assert (ids(prepared), prepared.truncated) == ([FOX] * 16, True)
        prepared = one(static, "слово fox " * 16, embed())
        assert (ids(prepared), prepared.truncated) == ([FOX] * 16, False)
        assert static.estimate("") == 1

    @pytest.mark.parametrize("text", ["", "слово", " "])
    def test_a_text_without_a_token_is_zeros(self, static: TextPipeline, text: str) -> None:
        """As in model2vec and StaticEmbedding, whatever the graph returns for the placeholder token."""
        batch = [one(static, text, embed()), one(static, "fox", embed(dimensions=4))]
        assert (batch[0].tokens, batch[0].cost) == (0, 1)
        assert static.collate(batch, FACTS)["attention_mask"].tolist() == [[1], [1]]
        first, second = static.finish({"pooled": numbers(2, 8)}, batch)
        np.testing.assert_array_equal(first, np.zeros(8, dtype=np.float32))
        assert isinstance(second, np.ndarray)
        assert np.linalg.norm(second) == pytest.approx(1.0)

    @pytest.mark.parametrize("modules", [("dense:tanh",), ("dense:identity", "normalize"), ("layer_norm",)])
    def test_a_text_without_a_token_behind_other_modules(self, tmp_path: Path, modules: tuple[str, ...]) -> None:
        """No token is attended: the mean is zeros, and the model's modules turn it into the row, which is returned
        unchanged."""
        tiny_tokenizers.save(tiny_tokenizers.wordpiece(), tmp_path)
        static = made(tmp_path, frame_tokens=False, dropped=(UNK,), modules=modules)
        batch = [one(static, "", embed(normalize=False)), one(static, "fox", embed(normalize=False))]
        assert static.collate(batch, FACTS)["attention_mask"].tolist() == [[0], [1]]
        rows = static.finish({"pooled": numbers(2, 8)}, batch)
        for row, number in zip(rows, numbers(2, 8), strict=True):
            assert isinstance(row, np.ndarray) and np.array_equal(row, number)

    def test_token_ids_are_not_dropped(self, static: TextPipeline) -> None:
        """Ids are used exactly as given."""
        assert ids(one(static, [UNK, FOX], embed())) == [UNK, FOX]
