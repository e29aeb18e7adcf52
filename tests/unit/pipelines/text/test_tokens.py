from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from shoal.core.protocols import EngineFacts, Prepared
from shoal.errors import EmptyInput, InvalidValue, ModelFileError, NotFinite, ShoalError, TooLong, Unsupported
from shoal.pipelines.text.base import TokenizedItem
from shoal.pipelines.text.tokens import TextPipeline
from shoal.specs import MultiSpec, TextSpec
from shoal.types import Embed, TextItem
from tests.unit.pipelines import tiny_tokenizers
from tests.unit.pipelines.tiny_tokenizers import spec

ALL_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "pooling_mask")
PROMPTS = {"query": "query: ", "passage": "passage: "}


def embed(**fields: Any) -> Embed:
    return Embed(model="m", inputs=[], **fields)


def facts(**fields: Any) -> EngineFacts:
    return EngineFacts(name="e", inputs=ALL_INPUTS, outputs=("pooled",), **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizers.save(tiny_tokenizers.wordpiece(), tmp_path_factory.mktemp("wordpiece"))


@pytest.fixture(scope="module")
def raw() -> Tokenizer:
    return tiny_tokenizers.wordpiece()


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> TextPipeline:
    return TextPipeline(folder, spec(inputs=ALL_INPUTS, prompts=PROMPTS), truncate=True)


@pytest.fixture(scope="module")
def adapted(folder: Path) -> TextPipeline:
    described = spec(
        inputs=("input_ids", "attention_mask", "adapter_ids"),
        prompts={"retrieval.query": "query: ", "retrieval.passage": "", "separation": "", "other": "say: "},
        embedding_tasks=("retrieval.query", "retrieval.passage", "separation"),
        default_embedding_task="separation",
    )
    return TextPipeline(folder, described, truncate=True)


def one(pipeline: TextPipeline, item: TextItem, **fields: Any) -> Prepared:
    prepared = pipeline.prepare([(embed(**fields), item)])[0]
    assert isinstance(prepared, Prepared), prepared
    return prepared


def fault(pipeline: TextPipeline, item: TextItem, **fields: Any) -> ShoalError:
    error = pipeline.prepare([(embed(**fields), item)])[0]
    assert isinstance(error, ShoalError)
    return error


def ids(prepared: Prepared) -> list[int]:
    tensor: list[int] = prepared.tensors["input_ids"].tolist()
    return tensor


def entries(pipeline: TextPipeline, task: Embed, items: Sequence[Any]) -> list[Any]:
    """Return what each item became: what can be compared of a Prepared, or the error's kind, text and field."""
    return [
        (each.key, each.cost, each.tokens, each.truncated, each.group, each.outputs, each.extra)
        if isinstance(each, Prepared)
        else (each.kind, each.message, each.param)
        for each in pipeline.prepare([(task, item) for item in items])
    ]


WORDS = "the query the passage fish fishing together Ünïcode \u6771\u4eac \U0001f41f . , \t\n"


@pytest.fixture(scope="module")
def pipelines(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[TextPipeline]:
    byte_bpe = tiny_tokenizers.save(tiny_tokenizers.byte_bpe(), tmp_path_factory.mktemp("byte_bpe"))
    multi = MultiSpec(dimension=4, query_marker=3, query_length=9, document_length=12, fill_id=4)
    specs = [
        (folder, spec(inputs=ALL_INPUTS, prompts=PROMPTS, include_prompt=False)),
        (folder, spec(prompts=PROMPTS, default_prompt_name="passage", multi=multi)),
        (byte_bpe, spec(prompts=PROMPTS, dropped=(5, 6))),
        (folder, spec(frame_tokens=False, lower_case=True)),
    ]
    return [TextPipeline(place, described, truncate=True) for place, described in specs]


class TestTokensOfAnotherProcess:
    """A copy of the pipeline tokenizes; the pipeline itself gets only the tokens and the options."""

    @given(
        inputs=st.lists(
            st.lists(st.sampled_from(WORDS.split(" ")), max_size=40).map(" ".join) | st.text() | st.just([5, 6, 7]),
            min_size=1,
            max_size=4,
        ),
        input_type=st.sampled_from([None, "query", "document"]),
        truncate=st.booleans(),
        direction=st.sampled_from(["left", "right"]),
        number=st.integers(0, 3),
    )
    def test_they_are_its_own(
        self,
        pipelines: list[TextPipeline],
        inputs: list[Any],
        input_type: str | None,
        truncate: bool,
        direction: Any,
        number: int,
    ) -> None:
        """Tensors, counts, options and errors are those of the texts; surrogates and token ids are left alone."""
        pipeline = pipelines[number]
        copy = TextPipeline(pipeline.folder, pipeline.spec, truncate=False)
        assert copy.tokenizer_id == pipeline.tokenizer_id
        task = Embed(model="m", inputs=inputs, input_type=input_type, truncate=truncate, truncation_direction=direction)
        tokenized = pipeline.unpack_tokens(copy.tokenize(task), inputs)
        assert entries(pipeline, task, tokenized) == entries(pipeline, task, inputs)
        assert [isinstance(item, TokenizedItem) for item in tokenized] == [isinstance(item, str) for item in inputs]

    def test_a_text_that_cannot_be_read_is_left_to_the_other(self, pipeline: TextPipeline) -> None:
        """The entry stays a text, so that the error is the pipeline's own."""
        task = Embed(model="m", inputs=["fish", "\ud800"])
        one, other = pipeline.unpack_tokens(pipeline.tokenize(task), task.inputs)
        assert isinstance(one, TokenizedItem)
        assert other == "\ud800"

    def test_the_estimate_grows_with_the_tokens(self, pipeline: TextPipeline) -> None:
        """Long ones are work, too; less than to make them."""
        long = TextPipeline(pipeline.folder, spec(max_tokens=8192), truncate=True)
        texts = ["fish", "fish " * 8000]
        items = long.unpack_tokens(long.tokenize(Embed(model="m", inputs=texts)), texts)
        assert [long.estimate(item) for item in items] == [4, 4 + 8192 // 32]

    def test_an_invalid_task_is_an_error(self, pipeline: TextPipeline) -> None:
        with pytest.raises(InvalidValue):
            pipeline.tokenize(Embed(model="m", inputs=["a"], prompt_name="nobody"))

    def test_whatever_changes_the_tokens_changes_the_id(self, pipeline: TextPipeline, tmp_path: Path) -> None:
        """A prompt, a limit, a setting of the tokenizer, or its file."""
        folder = pipeline.folder
        changed = [
            TextPipeline(folder, spec(inputs=ALL_INPUTS, prompts=PROMPTS | {"query": "q"}), truncate=True),
            TextPipeline(folder, spec(inputs=ALL_INPUTS, prompts=PROMPTS, max_tokens=15), truncate=True),
            TextPipeline(folder, spec(inputs=ALL_INPUTS, prompts=PROMPTS, lower_case=True), truncate=True),
        ]
        file = (folder / "tokenizer.json").read_text()
        (tmp_path / "tokenizer.json").write_text(file + "\n")
        changed.append(TextPipeline(tmp_path, pipeline.spec, truncate=True))
        assert len({each.tokenizer_id for each in (pipeline, *changed)}) == 5


class TestTasks:
    """A model with an adapter for each of its tasks, which are requested by the names of their prompts."""

    def test_names_roles_and_the_default_choose_the_adapter(self, adapted: TextPipeline) -> None:
        """All of a row have its number; tasks share a batch, and rows of padding have none."""
        wishes: list[dict[str, Any]] = [
            {"prompt_name": "retrieval.query"},
            {"input_type": "query"},
            {"input_type": "document"},
            {"prompt_name": "other"},
            {},
        ]
        batch = [one(adapted, "the fox", **wish) for wish in wishes]
        assert {item.group for item in batch} == {()}
        rows = adapted.collate(batch, facts(size_buckets=(8,), length_buckets=(16,)))["adapter_ids"]
        assert [row.tolist() for row in rows] == [[number] * 16 for number in (1, 1, 2, 3, 3, 0, 0, 0)]
        assert ids(batch[0]) == ids(batch[1]) != ids(batch[2])

    def test_the_default_prompt_chooses_its_adapter(self, folder: Path, adapted: TextPipeline) -> None:
        """Where a request names nothing; one that is no task leaves the default task."""
        for name, number in (("retrieval.query", 1), ("other", 3)):
            described = msgspec.structs.replace(adapted.spec, default_prompt_name=name)
            pipeline = TextPipeline(folder, described, truncate=True)
            batch = [one(pipeline, "the fox"), one(pipeline, "the fox", input_type="document")]
            rows = pipeline.collate(batch, facts())["adapter_ids"]
            assert rows[:, 0].tolist() == [number, 2]

    def test_a_graph_with_adapters_needs_tasks(self, folder: Path) -> None:
        with pytest.raises(ModelFileError, match=r"adapter_ids needs a model whose config\.json names its tasks"):
            TextPipeline(folder, spec(inputs=("input_ids", "adapter_ids")), truncate=True)

    def test_equal_texts_of_two_tasks_are_not_one_item(self, adapted: TextPipeline) -> None:
        keys = {one(adapted, "the fox", prompt_name=name).key for name in ("retrieval.passage", "separation")}
        assert len(keys) == 2

    def test_token_ids_have_a_task_too(self, adapted: TextPipeline) -> None:
        """By role, which prepends no prompt here, or the default."""
        batch = [one(adapted, [2, 3], input_type="document"), one(adapted, [2, 3])]
        assert adapted.collate(batch, facts())["adapter_ids"].tolist() == [[2, 2], [3, 3]]

    def test_an_unknown_task_is_refused(self, adapted: TextPipeline) -> None:
        with pytest.raises(InvalidValue, match=r"it has: other, retrieval\.passage, retrieval\.query, separation"):
            adapted.check(embed(prompt_name="cooking"))


class TestCheck:
    @pytest.mark.parametrize("dimensions", [None, 1, 8])
    def test_dimensions_within_the_model_pass(self, pipeline: TextPipeline, dimensions: int | None) -> None:
        """From 1 to the model's own dimension."""
        assert pipeline.check(embed(dimensions=dimensions)) is None  # type: ignore[func-returns-value]

    @pytest.mark.parametrize("dimensions", [0, -1, 9])
    def test_other_dimensions_are_refused(self, pipeline: TextPipeline, dimensions: int) -> None:
        """The error names the field and the bounds."""
        with pytest.raises(InvalidValue, match="between 1 and 8") as caught:
            pipeline.check(embed(dimensions=dimensions))
        assert caught.value.param == "dimensions"

    def test_unknown_prompts_are_refused(self, pipeline: TextPipeline) -> None:
        """A prompt that the model lacks fails the task before anything is tokenised."""
        with pytest.raises(InvalidValue, match="passage, query"):
            pipeline.check(embed(prompt_name="nope"))

    def test_a_role_without_a_prompt_passes(self, folder: Path) -> None:
        """query and document are understood by every model."""
        plain = TextPipeline(folder, spec(), truncate=True)
        plain.check(embed(input_type="query"))
        plain.check(embed(input_type="document"))
        assert ids(one(plain, "fox", input_type="query")) == ids(one(plain, "fox"))

    @pytest.mark.parametrize(
        ("ends_normalized", "pooled", "gives"),
        [(True, "pooled", True), (True, "sentence_embedding", False), (False, "sentence_embedding", True)],
    )
    def test_raw_vectors_only_where_the_graph_gives_them(
        self, folder: Path, ends_normalized: bool, pooled: str, gives: bool
    ) -> None:
        """normalize=False needs an output from before the Normalize module, or a model without one."""
        pipeline = TextPipeline(folder, spec(ends_normalized=ends_normalized, pooled=pooled), truncate=True)
        if gives:
            pipeline.check(embed(normalize=False))
        else:
            with pytest.raises(Unsupported) as caught:
                pipeline.check(embed(normalize=False))
            assert caught.value.param == "normalize"


class TestEstimate:
    def test_ids_count_exactly(self, pipeline: TextPipeline) -> None:
        """Token ids are their own count."""
        assert pipeline.estimate([1, 2, 3]) == 3

    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=128))
    def test_short_texts_count_at_most_max_tokens(self, pipeline: TextPipeline, text: str) -> None:
        """The count is bytes / 3 plus the special tokens, at most max_tokens."""
        assert pipeline.estimate(text) == min(16, 2 + len(text.encode()) // 3)

    def test_a_very_long_text_counts_in_full(self, pipeline: TextPipeline) -> None:
        """The full count marks a large job for the choice of where to tokenize."""
        assert pipeline.estimate("x" * 3_000) == 1_002


class TestTexts:
    @pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60), left=st.booleans())
    def test_ids_are_those_of_the_plain_tokenizer(
        self, tmp_path_factory: pytest.TempPathFactory, kind: str, text: str, left: bool
    ) -> None:
        """Parity with tokenizers.Tokenizer set to truncate, on any text."""
        pipeline, plain = _kind(tmp_path_factory, kind)
        direction = "left" if left else "right"
        plain.enable_truncation(16, direction=direction)
        expected = plain.encode(text)
        prepared = one(pipeline, text, truncation_direction=direction)
        assert ids(prepared) == expected.ids
        assert prepared.truncated == bool(expected.overflowing)
        assert prepared.cost == prepared.tokens == len(expected.ids)

    def test_blanks_stay(self, tmp_path: Path) -> None:
        """Texts are not stripped, as in sentence-transformers 6: byte-level models see the difference."""
        tiny_tokenizers.save(tiny_tokenizers.byte_bpe(), tmp_path)
        pipeline = TextPipeline(tmp_path, spec(), truncate=True)
        assert ids(one(pipeline, "  fox ")) != ids(one(pipeline, "fox"))

    def test_the_empty_text_is_its_special_tokens(self, pipeline: TextPipeline) -> None:
        """The surface decides whether empty texts are allowed."""
        assert one(pipeline, "").tokens == 2

    @pytest.mark.parametrize("text", ["\x00", "a\x00b", "\u200b", "\ufffd", "\U0010ffff", "🐟" * 50])
    def test_any_unicode_can_be_read(self, pipeline: TextPipeline, text: str) -> None:
        """NUL, zero-width, private and astral characters are just text."""
        assert 2 <= one(pipeline, text).tokens <= 16

    def test_a_text_that_gives_no_token_is_empty(self, tmp_path: Path) -> None:
        """Without special tokens an empty text has nothing to embed."""
        raw = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
        raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tiny_tokenizers.save(raw, tmp_path)
        assert isinstance(fault(TextPipeline(tmp_path, spec(), truncate=True), " "), EmptyInput)

    def test_a_text_that_the_tokenizer_cannot_read_fails_alone(self, tmp_path: Path) -> None:
        """The library fails the whole call for one unknown word; only that text must fail."""
        raw = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
        raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tiny_tokenizers.save(raw, tmp_path)
        pipeline = TextPipeline(tmp_path, spec(), truncate=True)
        first, bad, last = pipeline.prepare([(embed(), text) for text in ("a b", "a c", "b")])
        assert isinstance(first, Prepared)
        assert ids(first) == [0, 1]
        assert isinstance(bad, InvalidValue)
        assert isinstance(last, Prepared)

    def test_a_lone_surrogate_fails_alone(self, pipeline: TextPipeline) -> None:
        """Invalid UTF-8 is refused by name; the other texts of the call are unaffected."""
        task = embed()
        first, bad, last = pipeline.prepare([(task, "fox"), (task, "\ud800"), (task, "dog")])
        assert isinstance(first, Prepared)
        assert isinstance(bad, InvalidValue)
        assert isinstance(last, Prepared)


class TestPrompts:
    def test_the_prompt_comes_before_the_text(self, pipeline: TextPipeline) -> None:
        """prompt + text, tokenised as one."""
        assert ids(one(pipeline, "fox", prompt_name="query")) == ids(one(pipeline, "query: fox"))
        assert ids(one(pipeline, "fox", input_type="document")) == ids(one(pipeline, "passage: fox"))

    def test_the_default_prompt_is_used_without_a_prompt_name(self, folder: Path) -> None:
        """default_prompt_name applies to texts, and not to token ids."""
        pipeline = TextPipeline(folder, spec(prompts=PROMPTS, default_prompt_name="query"), truncate=True)
        assert ids(one(pipeline, "fox")) == ids(one(pipeline, "fox", prompt_name="query"))
        assert ids(one(pipeline, [5, 6])) == [5, 6]

    @pytest.mark.parametrize("fields", [{"prompt_name": "query"}, {"input_type": "query"}])
    def test_a_prompt_for_token_ids_is_refused(self, pipeline: TextPipeline, fields: dict[str, str]) -> None:
        """A prompt requested by name or role cannot precede token ids."""
        error = fault(pipeline, [5], **fields)
        assert isinstance(error, InvalidValue)
        assert error.param == next(iter(fields))

    def test_a_role_that_adds_nothing_passes_with_ids(self, folder: Path) -> None:
        """input_type on a model without prompts changes nothing, for ids too."""
        assert ids(one(TextPipeline(folder, spec(), truncate=True), [5], input_type="query")) == [5]

    def test_an_unknown_prompt_fails_its_own_items(self, pipeline: TextPipeline) -> None:
        """prepare returns the error of check in place of that item."""
        answers = pipeline.prepare([(embed(prompt_name="nope"), "fox"), (embed(), "fox")])
        assert isinstance(answers[0], InvalidValue)
        assert isinstance(answers[1], Prepared)


class TestIncludePrompt:
    @pytest.fixture
    def masking(self, folder: Path) -> TextPipeline:
        return TextPipeline(folder, spec(inputs=ALL_INPUTS, prompts=PROMPTS, include_prompt=False), truncate=True)

    def mask(self, pipeline: TextPipeline, text: str, **fields: Any) -> list[int]:
        row: list[int] = pipeline.collate([one(pipeline, text, **fields)], facts())["pooling_mask"][0].tolist()
        return row

    def test_the_prompts_tokens_are_left_out(self, masking: TextPipeline) -> None:
        """[CLS] query : are masked; the text and [SEP] are pooled."""
        assert self.mask(masking, "fox", prompt_name="query") == [0, 0, 0, 1, 1]

    def test_without_a_prompt_all_is_pooled(self, masking: TextPipeline) -> None:
        """No prompt, no mask; [CLS] is pooled too."""
        assert self.mask(masking, "fox") == [1, 1, 1]

    def test_an_included_prompt_is_pooled(self, pipeline: TextPipeline) -> None:
        """include_prompt is true by default."""
        assert self.mask(pipeline, "fox", prompt_name="query") == [1] * 5

    @pytest.mark.parametrize("words", [14, 15, 100, 5_000])
    def test_tokens_dropped_by_left_truncation_are_not_masked_again(self, masking: TextPipeline, words: int) -> None:
        """Left truncation drops the prompt first: only its remaining tokens and [CLS] are masked."""
        mask = self.mask(masking, "fox " * words, prompt_name="query", truncation_direction="left")
        dropped = words + 4 - 16
        masked = max(1, 3 - dropped)
        assert mask == [0] * masked + [1] * (16 - masked)

    def test_a_tokenizer_without_a_closing_token_counts_all_of_the_prompt(self, tmp_path: Path) -> None:
        """Only a special token after the prompt does not belong to the prompt."""
        raw = tiny_tokenizers.wordpiece()
        raw.post_processor = None
        tiny_tokenizers.save(raw, tmp_path)
        pipeline = TextPipeline(tmp_path, spec(inputs=ALL_INPUTS, prompts=PROMPTS, include_prompt=False), truncate=True)
        assert self.mask(pipeline, "fox", prompt_name="query") == [0, 0, 1]

    def test_a_graph_without_the_mask_is_refused(self, folder: Path) -> None:
        """Pooling the prompt would give other vectors than the model's."""
        with pytest.raises(ModelFileError, match="include_prompt"):
            TextPipeline(folder, spec(prompts=PROMPTS, include_prompt=False), truncate=True)


class TestTokenIds:
    def test_ids_are_used_as_given(self, pipeline: TextPipeline) -> None:
        """No special tokens, no order, no change."""
        prepared = one(pipeline, [7, 5, 7])
        assert ids(prepared) == [7, 5, 7]
        assert prepared.tokens == 3

    @pytest.mark.parametrize("bad", [-1, 99_999, 2**70])
    def test_the_first_id_outside_the_vocabulary_is_named(self, pipeline: TextPipeline, bad: int) -> None:
        """The message names the id, the range and the usual cause."""
        error = fault(pipeline, [5, bad, -2])
        assert isinstance(error, InvalidValue)
        assert error.param == "input"
        assert f"token id {bad} is outside" in error.message
        assert "check_embedding_ctx_length" in error.message

    def test_the_specs_vocabulary_wins(self, folder: Path) -> None:
        """The graph's embedding table decides, where the spec knows its size."""
        pipeline = TextPipeline(folder, spec(vocab_size=6), truncate=True)
        assert ids(one(pipeline, [5])) == [5]
        assert isinstance(fault(pipeline, [6]), InvalidValue)

    def test_no_ids_are_empty_input(self, pipeline: TextPipeline) -> None:
        """An empty list is not a vector of nothing."""
        assert isinstance(fault(pipeline, []), EmptyInput)

    @pytest.mark.parametrize(("direction", "expected"), [("right", range(16)), ("left", range(4, 20))])
    def test_too_many_ids_are_cut(self, pipeline: TextPipeline, direction: str, expected: range) -> None:
        """Either end is cut, as the task requests."""
        prepared = one(pipeline, list(range(20)), truncation_direction=direction)
        assert ids(prepared) == list(expected)
        assert prepared.truncated


class TestTruncation:
    @pytest.mark.parametrize("item", ["fox " * 30, list(range(32))])
    @pytest.mark.parametrize(("setting", "truncate"), [(False, None), (True, False)])
    def test_too_long_where_cutting_is_off(
        self, folder: Path, item: TextItem, setting: bool, truncate: bool | None
    ) -> None:
        """The setting applies unless the task overrides it; the error has both counts."""
        error = fault(TextPipeline(folder, spec(), truncate=setting), item, truncate=truncate)
        assert isinstance(error, TooLong)
        assert "32 tokens" in error.message
        assert "at most 16" in error.message

    def test_a_task_may_allow_cutting(self, folder: Path) -> None:
        """truncate=True on the task wins over a model that does not cut."""
        assert one(TextPipeline(folder, spec(), truncate=False), "fox " * 30, truncate=True).truncated

    def test_a_far_too_long_text_is_counted_only_so_far(self, folder: Path) -> None:
        """The error is raised without tokenizing all of the text, and states that."""
        error = fault(TextPipeline(folder, spec(), truncate=False), "fox " * 100_000)
        assert isinstance(error, TooLong)
        assert "at least" in error.message

    def test_a_text_that_just_fits_is_whole(self, folder: Path) -> None:
        """max_tokens includes special tokens and is inclusive."""
        prepared = one(TextPipeline(folder, spec(), truncate=False), "fox " * 14)
        assert (prepared.tokens, prepared.truncated) == (16, False)


class TestKeys:
    def test_equal_work_has_equal_keys(self, pipeline: TextPipeline) -> None:
        """Texts with equal tokens share a key; requesting the model's own dimension changes nothing."""
        assert one(pipeline, "The fox").key == one(pipeline, "the  fox", dimensions=8).key

    @pytest.mark.parametrize("other", [{"dimensions": 4}, {"normalize": False}, {"prompt_name": "query"}])
    def test_options_that_change_the_row_change_the_key(self, pipeline: TextPipeline, other: dict[str, Any]) -> None:
        """Two items share an answer only if everything that affects it is equal."""
        assert one(pipeline, "fox").key != one(pipeline, "fox", **other).key

    def test_all_items_may_share_a_call(self, pipeline: TextPipeline) -> None:
        """Prompts, dimensions and normalization do not split a batch."""
        items = [one(pipeline, "fox"), one(pipeline, [5], dimensions=2), one(pipeline, "x", normalize=False)]
        assert {(p.group, p.outputs) for p in items} == {((), ("pooled",))}


class TestCollate:
    def test_shapes_padding_and_masks(self, pipeline: TextPipeline) -> None:
        """Rows and lengths are rounded up to their buckets; padding rows attend to one token; all tensors are int64."""
        batch = [one(pipeline, [5, 6, 7]), one(pipeline, [8]), one(pipeline, [9, 4])]
        tensors = pipeline.collate(batch, facts(length_buckets=(4, 8), size_buckets=(1, 4)))
        assert tensors["input_ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0], [9, 4, 0, 0], [0, 0, 0, 0]]
        assert tensors["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
        assert tensors["pooling_mask"].tolist() == tensors["attention_mask"].tolist()
        assert tensors["position_ids"].tolist() == [[0, 1, 2, 3]] * 4
        assert not tensors["token_type_ids"].any()
        assert set(tensors) == set(ALL_INPUTS)
        assert all(t.dtype == np.int64 and t.flags.c_contiguous and t.shape == (4, 4) for t in tensors.values())

    def test_only_the_graphs_inputs_are_made(self, folder: Path) -> None:
        """A graph without token_type_ids does not get any."""
        pipeline = TextPipeline(folder, spec(pad_id=3), truncate=True)
        tensors = pipeline.collate([one(pipeline, [5]), one(pipeline, [6, 7])], facts())
        assert set(tensors) == {"input_ids", "attention_mask"}
        assert tensors["input_ids"].tolist() == [[5, 3], [6, 7]]

    def test_above_the_last_bucket_sizes_stay(self, pipeline: TextPipeline) -> None:
        """A batch beyond every bucket keeps its size."""
        batch = [one(pipeline, [5, 6, 7])] * 3
        assert pipeline.collate(batch, facts(length_buckets=(2,), size_buckets=(2,)))["input_ids"].shape == (3, 3)

    def test_a_bucket_never_goes_past_the_models_positions(self, pipeline: TextPipeline) -> None:
        """max_tokens is 16: a bucket of 64 would read positions that do not exist."""
        batch = [one(pipeline, "fox " * 9)]
        assert pipeline.collate(batch, facts(length_buckets=(64,)))["input_ids"].shape == (1, 16)

    def test_inputs_that_no_text_gives_are_refused(self, folder: Path) -> None:
        """A graph that takes images is refused when it is loaded, not when it is called."""
        with pytest.raises(ModelFileError, match="pixel_values"):
            TextPipeline(folder, spec(inputs=("input_ids", "pixel_values")), truncate=True)


class TestFinish:
    def test_padding_rows_are_ignored_and_options_are_each_items_own(self, pipeline: TextPipeline) -> None:
        """NaN in a padding row affects no item; each item gets its own dimensions and norm."""
        batch = [one(pipeline, [5]), one(pipeline, [6], dimensions=2), one(pipeline, [7], normalize=False)]
        output = np.arange(1, 33, dtype=np.float32).reshape(4, 8)
        output[3] = np.nan
        first, second, third = pipeline.finish({"pooled": output}, batch)
        assert isinstance(first, np.ndarray)
        assert isinstance(second, np.ndarray)
        assert isinstance(third, np.ndarray)
        np.testing.assert_allclose(first, output[0] / np.linalg.norm(output[0]), rtol=1e-6)
        np.testing.assert_allclose(second, output[1, :2] / np.linalg.norm(output[1, :2]), rtol=1e-6)
        np.testing.assert_array_equal(third, output[2])

    def test_a_bad_row_fails_its_item(self, pipeline: TextPipeline) -> None:
        """One row of NaN is one NotFinite."""
        output = np.ones((2, 8), dtype=np.float32)
        output[0, 3] = np.nan
        bad, fine = pipeline.finish({"pooled": output}, [one(pipeline, [5]), one(pipeline, [6])])
        assert isinstance(bad, NotFinite)
        assert isinstance(fine, np.ndarray)


def test_threads_share_a_pipeline(pipeline: TextPipeline) -> None:
    """Eight concurrent threads get the same results as one."""
    tasks = [embed(), embed(prompt_name="query"), embed(dimensions=3, truncation_direction="left")]
    jobs = [[(tasks[(n + m) % 3], f"fox {n} " * (n * m + 1)) for m in range(6)] for n in range(16)]

    def keys(job: list[tuple[Embed, str]]) -> list[object]:
        return [answer.key for answer in pipeline.prepare(job) if isinstance(answer, Prepared)]

    alone = [keys(job) for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(keys, jobs)) == alone


_MADE: dict[str, tuple[TextPipeline, Tokenizer]] = {}


def _kind(factory: pytest.TempPathFactory, kind: str) -> tuple[TextPipeline, Tokenizer]:
    """Return the cached pipeline and plain tokenizer of a kind."""
    if kind not in _MADE:
        plain = tiny_tokenizers.KINDS[kind]()
        model: TextSpec = spec()
        _MADE[kind] = (TextPipeline(tiny_tokenizers.save(plain, factory.mktemp(kind)), model, truncate=True), plain)
    return _MADE[kind]


class TestPoolingHere:
    """Engines that return token vectors."""

    def made(self, folder: Path, **changes: Any) -> TextPipeline:
        fields: dict[str, Any] = {"pooled": "token_embeddings", "modules": ("normalize",), "prompts": PROMPTS}
        return TextPipeline(folder, spec(**(fields | changes)), truncate=True)

    def test_rows_are_pooled_over_their_own_tokens(self, folder: Path) -> None:
        """Padding and excluded prompts are left out without a mask input of the engine."""
        pipeline = self.made(folder, include_prompt=False)
        plain, prompted = one(pipeline, "a fox"), one(pipeline, "a fox", prompt_name="query")
        assert prompted.cost == plain.cost + 2
        tokens = np.random.default_rng(2).normal(size=(3, prompted.cost + 1, 8)).astype(np.float32)
        vectors = pipeline.finish({"token_embeddings": tokens}, [plain, prompted])
        for row, own in enumerate((tokens[0, : plain.cost], tokens[1, 3 : prompted.cost])):
            mean, vector = own.mean(axis=0), vectors[row]
            assert isinstance(vector, np.ndarray)
            np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), rtol=1e-5)

    def test_raw_vectors_can_always_be_had(self, folder: Path) -> None:
        """The final Normalize runs here or not at all."""
        pipeline = self.made(folder, sentence_embedding="token_embeddings")
        pipeline.check(embed(normalize=False))
        prepared = one(pipeline, "a", normalize=False)
        tokens = np.full((1, prepared.cost, 8), 3, np.float16)
        np.testing.assert_array_equal(pipeline.finish({"token_embeddings": tokens}, [prepared])[0], [3.0] * 8)

    @pytest.mark.parametrize("changes", [{"pooling": "median"}, {"modules": ("dense:tanh", "normalize")}])
    def test_unsupported_modules_are_refused(self, folder: Path, changes: dict[str, Any]) -> None:
        """Modules with weights must be in the graph."""
        with pytest.raises(ModelFileError, match=r"median|a dense:tanh follows"):
            self.made(folder, **changes)


def test_a_model_whose_rows_stay_as_they_are(folder: Path) -> None:
    """The operator's setting overrides a request's default."""
    pipeline = TextPipeline(folder, spec(), truncate=True, normalize=False)
    row = np.arange(8, dtype=np.float32)
    vectors = pipeline.finish({"pooled": row[None]}, [one(pipeline, "a")])
    np.testing.assert_array_equal(vectors[0], row)
