"""Texts for models that bring their own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from shoal.core.protocols import CountedRow, EngineFacts, Prepared, VectorSet
from shoal.errors import EmptyInput, InvalidValue, NotFinite, ShoalError, TooLong, Unsupported
from shoal.pipelines.text.codec import TokenizerCodec
from shoal.pipelines.text.strings import StringPipeline, StringSpec
from shoal.pipelines.text.tokenizer import TextTokenizer
from shoal.types import Array, Embed, SparseVector, TextItem, VectorKind
from tests.unit.pipelines import tiny_tokenizers

PROMPTS = {"query": "query: ", "passage": "passage: "}
FACTS = EngineFacts(name="e", inputs=("text",), outputs=("embedding",), size_buckets=(16,), length_buckets=(64,))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tiny_tokenizers.save(tiny_tokenizers.wordpiece(), tmp_path_factory.mktemp("strings"))
    return TextTokenizer(folder, "tokenizer.json")


def made(*, truncate: bool = True, normalize: bool | None = None, **fields: Any) -> StringPipeline:
    tokenizer = fields.pop("tokenizer", None)
    options: dict[str, Any] = {"dimension": 8, "prompts": PROMPTS}
    spec = StringSpec(**(options | fields))
    return StringPipeline(spec, truncate=truncate, normalize=normalize, tokenizer=tokenizer)


def embed(**fields: Any) -> Embed:
    return Embed(model="m", inputs=[], **fields)


def one(pipeline: StringPipeline, item: TextItem, **fields: Any) -> Prepared:
    prepared = pipeline.prepare([(embed(**fields), item)])[0]
    assert isinstance(prepared, Prepared), prepared
    return prepared


def fault(pipeline: StringPipeline, item: TextItem, **fields: Any) -> ShoalError:
    error = pipeline.prepare([(embed(**fields), item)])[0]
    assert isinstance(error, ShoalError)
    return error


def text(prepared: Prepared) -> str:
    (value,) = prepared.tensors["text"]
    assert isinstance(value, str)
    return value


class TestTexts:
    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({}, "a fox"),
            ({"prompt_name": "passage"}, "passage: a fox"),
            ({"input_type": "query"}, "query: a fox"),
            ({"input_type": "document"}, "passage: a fox"),
        ],
    )
    def test_prompts_stand_before_a_text(self, fields: dict[str, Any], expected: str) -> None:
        """The rules are those of every other model."""
        assert text(one(made(), "a fox", **fields)) == expected

    def test_the_default_prompt(self) -> None:
        """It applies if no prompt is named."""
        assert text(one(made(default_prompt_name="query"), "x")) == "query: x"

    def test_batches_are_not_padded(self) -> None:
        """Texts are sent unchanged, without padding to buckets or to each other."""
        pipeline = made()
        texts = ["", "a\x00b", "東京 🐟", " x " * 50]
        batch = [one(pipeline, each) for each in texts]
        tensors = pipeline.collate(batch, FACTS)
        assert tensors["text"].dtype == object
        assert tensors["text"].tolist() == texts

    @pytest.mark.parametrize("ids", [[5, 6], []])
    def test_token_ids_are_refused_with_the_next_step(self, ids: list[int]) -> None:
        """The model has its own tokenizer and cannot read ids."""
        error = fault(made(), ids)
        assert isinstance(error, InvalidValue)
        assert error.param == "input"
        assert "send the text itself" in error.message
        assert "`tokenizer`" in error.message

    def test_half_a_surrogate_pair_fails_alone(self) -> None:
        """UTF-8 cannot encode it."""
        answers = made().prepare([(embed(), "a"), (embed(), "b\ud800"), (embed(), "c")])
        assert [isinstance(answer, InvalidValue) for answer in answers] == [False, True, False]
        assert made().estimate("b\ud800") == 1

    def test_estimates_count_bytes(self) -> None:
        """One token for 3 bytes, at least one."""
        pipeline = made()
        estimates = [pipeline.estimate(each) for each in ("", "abc" * 5, "東" * 5, [1, 2, 3], [])]
        assert estimates == [1, 5, 5, 3, 1]


class TestCheck:
    def test_fields_at_fault_are_named(self) -> None:
        """Prompts, roles and dimensions, as for every other model."""
        for field, value in (("prompt_name", "nope"), ("input_type", "nope"), ("dimensions", 9), ("dimensions", 0)):
            with pytest.raises(InvalidValue) as caught:
                made().check(embed(**{field: value}))
            assert caught.value.param == field

    def test_a_bad_prompt_fails_its_items_too(self) -> None:
        """prepare gives the same error without a previous check."""
        assert isinstance(fault(made(), "x", prompt_name="nope"), InvalidValue)

    def test_raw_vectors_of_a_model_that_normalises(self) -> None:
        """The model has none, whatever the operator's setting."""
        made().check(embed(normalize=False))
        for setting in (None, False):
            with pytest.raises(Unsupported, match="omit normalize"):
                made(normalized=True, normalize=setting).check(embed(normalize=False))

    def test_truncation_options_require_a_tokenizer_with_a_limit(self, tokenizer: TextTokenizer) -> None:
        """Truncation is known from a tokenizer with a limit, or done by NIM."""
        for fields in ({"truncate": False}, {"truncation_direction": "left"}):
            for pipeline in (made(), made(max_tokens=16), made(tokenizer=tokenizer)):
                with pytest.raises(Unsupported) as caught:
                    pipeline.check(embed(**fields))
                assert caught.value.param == next(iter(fields))
            made(tokenizer=tokenizer, max_tokens=16).check(embed(**fields))
            made(nim=True).check(embed(**fields))
        made().check(embed(truncate=True))


class TestVectors:
    ROWS: Array = np.random.default_rng(3).normal(size=(2, 8)).astype(np.float32)

    def finished(self, pipeline: StringPipeline, rows: Array = ROWS, **fields: Any) -> list[Array]:
        batch = [one(pipeline, each, **fields) for each in ("a", "b")]
        answers = pipeline.finish({"embedding": rows}, batch)
        assert all(isinstance(answer, np.ndarray) for answer in answers)
        return [answer for answer in answers if isinstance(answer, np.ndarray)]

    @pytest.mark.parametrize("setting", [None, True])
    def test_unit_vectors_by_default(self, setting: bool | None) -> None:
        """Vectors are cut before they are normalized."""
        for dimensions in (None, 3):
            for row in self.finished(made(normalize=setting), dimensions=dimensions):
                assert np.linalg.norm(row) == pytest.approx(1.0)
        np.testing.assert_array_equal(self.finished(made(normalize=setting), normalize=False), self.ROWS)

    def test_a_model_whose_rows_stay_as_they_are(self) -> None:
        """The operator's setting overrides a request's default; rows are still cut."""
        np.testing.assert_array_equal(self.finished(made(normalize=False)), self.ROWS)
        np.testing.assert_array_equal(self.finished(made(normalize=False), dimensions=3), self.ROWS[:, :3])

    def test_an_axis_in_between_is_no_matter(self) -> None:
        """[n, 1, d] and half precision become [n, d] in float32."""
        rows = self.finished(made(), self.ROWS[:, None, :].astype(np.float16), normalize=False)
        np.testing.assert_array_equal(rows, self.ROWS.astype(np.float16).astype(np.float32))
        assert rows[0].dtype == np.float32

    def test_no_finite_answer_fails_alone(self) -> None:
        """Also where tokens come with it."""
        pipeline = made(token_count="token_count")
        rows = self.ROWS.copy()
        rows[0, 0] = np.nan
        outputs: dict[str, Array] = {"embedding": rows, "token_count": np.array([[3], [4]], np.int32)}
        first, second = pipeline.finish(outputs, [one(pipeline, "a"), one(pipeline, "b")])
        assert isinstance(first, NotFinite)
        assert isinstance(second, CountedRow)
        assert second.tokens == 4


class TestUsage:
    def test_tokens_are_estimated_without_a_count(self) -> None:
        """One token for 4 bytes, at least one."""
        assert [one(made(), each).tokens for each in ("", "a" * 40, "東" * 40)] == [1, 10, 30]

    def test_counted_with_a_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Prompt and special tokens are included; the model's own count is not requested."""
        pipeline = made(tokenizer=tokenizer, token_count="token_count")
        prepared = one(pipeline, "the fox", prompt_name="query")
        assert prepared.tokens == prepared.cost == len(tokenizer.encode(["query: the fox"])[0])
        assert prepared.outputs == ("embedding",)
        assert not prepared.truncated
        rows = pipeline.finish({"embedding": np.ones((1, 8), np.float32)}, [prepared])
        assert isinstance(rows[0], np.ndarray)

    def test_reported_by_the_model(self) -> None:
        """Its count replaces the estimate."""
        pipeline = made(token_count="token_count")
        batch = [one(pipeline, each) for each in ("a", "b")]
        assert batch[0].outputs == ("embedding", "token_count")
        outputs: dict[str, Array] = {"embedding": np.ones((3, 8)), "token_count": np.array([7, 9, 0])}
        answers = pipeline.finish(outputs, batch)
        assert [answer.tokens for answer in answers if isinstance(answer, CountedRow)] == [7, 9]

    def test_no_more_than_the_model_reads(self, tokenizer: TextTokenizer) -> None:
        """A text over the limit is reported as truncated and counts as the remaining tokens."""
        pipeline = made(tokenizer=tokenizer, max_tokens=16)
        prepared = one(pipeline, "fox " * 1000)
        assert (prepared.tokens, prepared.cost, prepared.truncated) == (16, 16, True)
        assert text(prepared) == "fox " * 1000
        assert pipeline.estimate("fox " * 1000) == 16

    def test_texts_over_the_limit_are_refused_without_truncation(self, tokenizer: TextTokenizer) -> None:
        """By request or by setting; left truncation is not available here."""
        pipeline = made(tokenizer=tokenizer, max_tokens=16)
        error = fault(pipeline, "fox " * 20, truncate=False)
        assert isinstance(error, TooLong)
        assert "22 tokens" in error.message
        strict = made(tokenizer=tokenizer, max_tokens=16, truncate=False)
        assert "at least" in fault(strict, "fox " * 1000).message
        assert isinstance(fault(pipeline, "fox " * 20, truncation_direction="left"), Unsupported)
        assert one(strict, "fox", truncation_direction="left").tokens == 3

    def test_a_text_that_the_tokenizer_cannot_read_is_estimated(self, tmp_path: Path) -> None:
        """A failed count does not refuse the text; the others are counted."""
        raw = Tokenizer(models.WordLevel({"fox": 0, "a": 1}, unk_token="[UNK]"))
        raw.pre_tokenizer = pre_tokenizers.Whitespace()
        raw.save(str(tmp_path / "tokenizer.json"))
        pipeline = made(tokenizer=TextTokenizer(tmp_path, "tokenizer.json"))
        answers = pipeline.prepare([(embed(), each) for each in ("fox a fox", "unheard of words", "a")])
        assert [answer.tokens for answer in answers if isinstance(answer, Prepared)] == [3, 4, 1]


class TestNim:
    @pytest.mark.parametrize(
        ("fields", "params"),
        [
            ({}, {"truncate": "END"}),
            ({"truncate": False}, {"truncate": "NONE"}),
            ({"truncation_direction": "left"}, {"truncate": "START"}),
            ({"input_type": "document"}, {"input_type": "passage", "truncate": "END"}),
            ({"input_type": "query", "dimensions": 3}, {"input_type": "query", "truncate": "END", "dimensions": 3}),
            ({"dimensions": 8}, {"truncate": "END"}),
        ],
    )
    def test_options_travel_as_parameters(self, fields: dict[str, Any], params: dict[str, Any]) -> None:
        """The model does what they say; no prompt is put before a text for a role."""
        pipeline = made(nim=True)
        pipeline.check(embed(**fields))
        prepared = one(pipeline, "a", **fields)
        assert prepared.params == params
        assert text(prepared) == "a"

    def test_options_part_batches(self) -> None:
        """Parameters apply to a whole call: items with other parameters share neither call nor answer."""
        pipeline = made(nim=True)
        plain, query = one(pipeline, "a"), one(pipeline, "a", input_type="query")
        assert plain.group != query.group
        assert plain.key != query.key
        assert plain.group == one(pipeline, "b").group

    def test_without_nim_all_share(self) -> None:
        """The model only gets texts."""
        plain, query = one(made(), "a"), one(made(), "a", input_type="query", dimensions=3)
        assert plain.group == query.group
        assert plain.params == query.params == {}

    def test_the_setting_decides_where_a_request_does_not(self) -> None:
        """With `truncate` false, the model refuses too long texts."""
        assert one(made(nim=True, truncate=False), "a").params == {"truncate": "NONE"}

    def test_unknown_roles_are_refused(self) -> None:
        """The model knows no more of them than others."""
        with pytest.raises(InvalidValue, match="clustering"):
            made(nim=True).check(embed(input_type="clustering"))

    def test_a_prompt_by_name_is_put_before_the_text(self) -> None:
        """A named prompt was requested explicitly."""
        assert text(one(made(nim=True), "a", prompt_name="query", input_type="query")) == "query: a"

    def test_vectors_cut_by_the_model_stay_whole(self) -> None:
        """The model already returns the requested dimensions."""
        pipeline = made(nim=True)
        row = pipeline.finish({"embedding": np.ones((1, 3), np.float32)}, [one(pipeline, "a", dimensions=3)])[0]
        assert isinstance(row, np.ndarray)
        assert row.shape == (3,)


async def test_the_tokenizer_can_be_shown(tokenizer: TextTokenizer) -> None:
    """Tokenization includes the model's prompts."""
    codec = TokenizerCodec(tokenizer, StringSpec(dimension=8, prompts=PROMPTS))
    (tokens,) = await codec.tokenize(["fox"], add_special_tokens=True, prompt_name="query")
    assert [token.text for token in tokens] == ["[CLS]", "query", ":", "fox", "[SEP]"]


class TestPassing:
    """Servers that apply options themselves."""

    TEI: ClassVar[dict[str, Any]] = {
        "passes": frozenset({"truncate", "truncation_direction", "prompt_name", "normalize", "dimensions"})
    }

    @pytest.mark.parametrize(
        ("fields", "params"),
        [
            ({}, {"truncate": True, "normalize": True}),
            ({"truncate": False, "truncation_direction": "left"}, {"truncate": False, "normalize": True}),
            (
                {"truncation_direction": "left", "normalize": False},
                {"truncate": True, "truncation_direction": "left", "normalize": False},
            ),
            ({"prompt_name": "nobody's"}, {"truncate": True, "prompt_name": "nobody's", "normalize": True}),
            ({"input_type": "document"}, {"truncate": True, "prompt_name": "passage", "normalize": True}),
            ({"dimensions": 3}, {"truncate": True, "normalize": True, "dimensions": 3}),
            ({"dimensions": 8}, {"truncate": True, "normalize": True}),
        ],
    )
    def test_options_travel_as_parameters(self, fields: dict[str, Any], params: dict[str, Any]) -> None:
        """The server knows its prompts, so that none is put before a text here, and any name may be asked for."""
        pipeline = made(default_prompt_name="query", normalized=True, **self.TEI)
        pipeline.check(embed(**fields))
        prepared = one(pipeline, "a", **fields)
        assert prepared.params == params
        assert text(prepared) == "a"
        assert prepared.group == one(pipeline, "b", **fields).group
        if fields not in ({}, {"dimensions": 8}):
            assert prepared.group != one(pipeline, "a").group
            assert prepared.key != one(pipeline, "a").key

    def test_rows_stay_as_the_server_made_them(self) -> None:
        """The server cuts and normalizes, or not."""
        pipeline = made(**self.TEI)
        row = np.full((1, 8), 2, np.float32)
        np.testing.assert_array_equal(pipeline.finish({"embedding": row}, [one(pipeline, "a")])[0], row[0])
        cut = pipeline.finish({"embedding": row[:, :3]}, [one(pipeline, "a", dimensions=3)])[0]
        np.testing.assert_array_equal(cut, row[0, :3])

    def test_rows_that_are_cut_here_are_normalised_here(self) -> None:
        """For a server that normalizes but does not cut."""
        pipeline = made(passes=frozenset({"normalize"}))
        prepared = one(pipeline, "a", dimensions=2)
        assert prepared.params == {"normalize": True}
        row = pipeline.finish({"embedding": np.full((1, 8), 8**-0.5, np.float32)}, [prepared])[0]
        assert isinstance(row, np.ndarray)
        assert np.linalg.norm(row) == pytest.approx(1.0)

    def test_the_operators_settings_are_sent(self) -> None:
        """Rows that stay raw, and texts that are not cut."""
        pipeline = made(truncate=False, normalize=False, **self.TEI)
        assert one(pipeline, "a").params == {"truncate": False, "normalize": False}

    def test_options_that_are_not_passed_are_applied_here(self) -> None:
        """The server can apply one option and Shoal another."""
        pipeline = made(passes=frozenset({"truncate"}))
        assert text(one(pipeline, "a", prompt_name="query")) == "query: a"
        pipeline.check(embed(truncate=False))
        with pytest.raises(Unsupported, match="at the end"):
            pipeline.check(embed(truncation_direction="left"))
        roles = made(passes=frozenset({"input_type"}))
        assert one(roles, "a", input_type="document").params == {"input_type": "document"}
        assert text(one(roles, "a", input_type="document")) == "a"
        both = made(passes=frozenset({"input_type", "prompt_name"}))
        assert one(both, "a", input_type="query").params == {"input_type": "query"}

    def test_unknown_roles_are_refused(self) -> None:
        """Whoever sees to them."""
        with pytest.raises(InvalidValue, match="clustering"):
            made(**self.TEI).check(embed(input_type="clustering"))

    def test_counted_texts_are_refused_before_they_travel(self, tokenizer: TextTokenizer) -> None:
        """The error has the count; left truncation is sent if the server supports it."""
        pipeline = made(tokenizer=tokenizer, max_tokens=16, **self.TEI)
        assert isinstance(fault(pipeline, "fox " * 20, truncate=False), TooLong)
        assert one(pipeline, "fox " * 20, truncation_direction="left").truncated


class TestTokenIds:
    def test_they_travel_in_the_place_of_a_text(self) -> None:
        """Token ids are sent in place of texts, also in lists of equal length."""
        pipeline = made(ids=True)
        batch = [one(pipeline, item) for item in ([5, 6], "a", [7, 8])]
        assert pipeline.collate(batch, FACTS)["text"].tolist() == [[5, 6], "a", [7, 8]]
        assert [item.tokens for item in batch] == [2, 1, 2]
        assert one(pipeline, [5, 6]).key == batch[0].key != batch[2].key

    @pytest.mark.parametrize("bad", [[], [5, -1], [2**31]])
    def test_invalid_token_ids_are_refused(self, bad: list[int]) -> None:
        """Empty lists and numbers outside of any vocabulary."""
        error = fault(made(ids=True), bad)
        assert isinstance(error, InvalidValue | EmptyInput)
        assert error.param == "input"

    def test_a_known_vocabulary_and_length_count(self, tokenizer: TextTokenizer) -> None:
        """The error names the id; too many ids are refused or truncated as texts are."""
        pipeline = made(ids=True, tokenizer=tokenizer, max_tokens=4)
        assert "token id 99999 is outside" in fault(pipeline, [5, 99_999]).message
        assert isinstance(fault(pipeline, [5] * 5, truncate=False), TooLong)
        assert (one(pipeline, [5] * 5).tokens, one(pipeline, [5] * 5).truncated) == (4, True)

    def test_a_prompt_is_for_texts(self) -> None:
        """Unless the server applies prompts to ids itself."""
        error = fault(made(ids=True), [5], prompt_name="query")
        assert isinstance(error, InvalidValue)
        assert error.param == "prompt_name"
        assert one(made(ids=True, **TestPassing.TEI), [5], prompt_name="query").params["prompt_name"] == "query"


class TestKinds:
    SPARSE = SparseVector(np.array([3, 7], np.int32), np.array([1, 2], np.float32))

    def answer(self, *rows: object) -> Array:
        array = np.empty(len(rows), dtype=object)
        array[:] = rows
        return array

    def test_each_set_of_kinds_has_calls_of_its_own(self) -> None:
        """The server has one path for each kind."""
        pipeline = made(kinds=("dense", "sparse", "tokens", "multi"), token_count="token_count")
        sets: list[tuple[VectorKind, ...]] = [("dense",), ("sparse",), ("tokens",), ("dense", "multi")]
        prepared = [one(pipeline, "a", outputs=kinds) for kinds in sets]
        assert [item.outputs[:-1] for item in prepared] == [
            ("embedding",),
            ("sparse_embedding",),
            ("token_embeddings",),
            ("embedding", "multi_vectors"),
        ]
        assert all(item.outputs[-1] == "token_count" for item in prepared)
        assert len({item.group for item in prepared}) == len({item.key for item in prepared}) == 4

    def test_rows_of_every_kind(self) -> None:
        """Object arrays hold one value per row; dense vectors keep their shape."""
        pipeline = made(kinds=("dense", "sparse", "tokens"))
        prepared = one(pipeline, "a", outputs=("sparse", "tokens", "dense"))
        tokens = np.ones((5, 8), np.float16)
        outputs = {
            "embedding": np.full((1, 8), 2, np.float32),
            "sparse_embedding": self.answer(self.SPARSE),
            "token_embeddings": self.answer(tokens, tokens)[:1],
        }
        (row,) = pipeline.finish(outputs, [prepared])
        assert isinstance(row, VectorSet)
        assert row.sparse is self.SPARSE
        assert row.multi is None
        assert row.tokens is not None
        assert row.tokens.dtype == np.float32
        assert row.tokens.shape == (5, 8)
        assert row.dense is not None
        assert np.linalg.norm(row.dense) == pytest.approx(1.0)

    def test_no_finite_answer_fails_alone(self) -> None:
        """For any kind, with or without counts."""
        pipeline = made(kinds=("dense", "sparse"), dimension=8, token_count="count")
        bad = SparseVector(self.SPARSE.indices, np.array([1, np.nan], np.float32))
        batch = [one(pipeline, each, outputs=("sparse",)) for each in ("a", "b")]
        first, second = pipeline.finish(
            {"sparse_embedding": self.answer(bad, self.SPARSE), "count": np.array([3, 4])}, batch
        )
        assert isinstance(first, NotFinite)
        assert isinstance(second, CountedRow)
        assert second.tokens == 4
        batch = [one(pipeline, "a", outputs=("dense", "sparse"))]
        rows = np.full((1, 8), np.nan, np.float32)
        (row,) = pipeline.finish(
            {"embedding": rows, "sparse_embedding": self.answer(self.SPARSE), "count": np.array([3])}, batch
        )
        assert isinstance(row, NotFinite)

    def test_kinds_that_the_server_lacks(self) -> None:
        """Including dense vectors."""
        pipeline = made(dimension=0, kinds=("sparse",))
        with pytest.raises(Unsupported, match="no dense vectors; it has: sparse"):
            pipeline.check(embed())
        assert isinstance(fault(pipeline, "a"), Unsupported)
        pipeline.check(embed(outputs=("sparse",)))
