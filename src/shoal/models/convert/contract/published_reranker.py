"""Read a language model as a reranker in the form in which it was published: prompt, answers and lengths as its model
card computes them. The files hold none of that; `models.rerankers` marks a folder that is read so.

Sources: the model cards of Qwen3-Reranker, bge-reranker-v2-gemma (as FlagEmbedding has it) and mxbai-rerank-v2 (as the
mxbai-rerank package has it).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from shoal.errors import ModelFileError
from shoal.models.convert.contract.classifier_heads import make_answers
from shoal.models.convert.contract.families import read_encoder
from shoal.models.convert.contract.json_file import JsonFile, read_object
from shoal.models.convert.contract.lengths import Length
from shoal.models.convert.contract.special_tokens import read_special_tokens
from shoal.models.convert.contract.types import Classifier, Contract, Pooling
from shoal.models.rerankers import FORMS, MARK
from shoal.specs import PairTemplate, ScoreSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKENIZER = "tokenizer.json"
_CUT = "\x1e"
"""The template's parts on both sides of it are tokenized apart."""

_SYSTEM = 'messages | selectattr("role", "eq", "system") | map(attribute="content") | first'
_QUERY = '{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}'
_DOCUMENT = '{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}'


class _Form(NamedTuple):
    """`source`: the template, with an instruction as its system message. `texts`: its variables. `answers`: the word of
    a relevant document and, if the score is their difference, that of another. `longest`: tokens of the whole, or with
    a `query_share` of the pair alone: without the texts beside it and the line end after it, but with a special token
    before it. `query_share`: of these for the query, in quarters."""

    source: str
    texts: dict[str, str]
    answers: tuple[str, ...]
    longest: int
    query_share: int | None = None


_QWEN3 = _Form(
    source=f"{{{{ start }}}}<Instruct>: {{{{ {_SYSTEM} | default(instruction) }}}}\n"
    f"<Query>: {_QUERY}\n<Document>: {_DOCUMENT}{{{{ end }}}}",
    texts={
        "start": "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        "instruction": "Given a web search query, retrieve relevant passages that answer the query",
        "end": "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    },
    answers=("yes", "no"),
    longest=8192,
)
_BGE = _Form(
    source=f"{{{{ bos_token }}}}{_CUT}A: {_QUERY}{_CUT}\n{_CUT}B: {_DOCUMENT}{_CUT}\n{_CUT}"
    f"{{{{ {_SYSTEM} | default(prompt) }}}}",
    texts={
        "prompt": "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
        "providing a prediction of either 'Yes' or 'No'."
    },
    answers=("Yes",),
    longest=1024,
    query_share=3,
)
_MXBAI = _Form(
    source=f'{{{{ start }}}}{_CUT}{{{{ "instruction: " ~ ({_SYSTEM}) ~ "\\n" if {_SYSTEM} else "" }}}}'
    f"query: {_QUERY}{_CUT}\n{_CUT}document: {_DOCUMENT}{_CUT}\n{_CUT}{{{{ task }}}}{_CUT}{{{{ end }}}}",
    texts={
        "start": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n",
        "task": "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
        "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
        "end": "<|im_end|>\n<|im_start|>assistant\n",
    },
    answers=("1", "0"),
    longest=8192,
    query_share=3,
)
_FORMS = {"qwen3": _QWEN3, "bge": _BGE, "mxbai": _MXBAI}


def read_form(folder: Path) -> str:
    """Return the form of reranker that the folder is marked with, "" if it is not. Raises ModelFileError for an unknown
    one."""
    mark = read_object(folder, MARK)
    if mark is None:
        return ""
    if mark.text("form") not in _FORMS:
        raise mark.refuse("form", f"must be one of {', '.join(_FORMS)}, not {mark.text('form')!r}")
    return mark.text("form")


def read_published_reranker(folder: Path, name: str) -> Contract:
    """Read the language model in `folder` as a reranker of the form `name`. Raises ModelFileError, naming file and key,
    for files that are not of this form."""
    form = _FORMS[name]
    config = _read_config(folder, name)
    encoder, tokenizer = read_encoder(config), _read_tokenizer(folder)
    variables = _read_variables(folder, form)
    after = _count_after(form, variables, tokenizer)
    length = min(
        Length(form.longest + after, MARK, "form"),
        Length(encoder.usable_positions, config.name, "max_position_embeddings"),
    )
    template = PairTemplate(source=form.source, file=MARK, variables=variables)
    if form.query_share is not None:
        longest = max(length.tokens - after, 1)
        template = replace(
            template,
            apart=_CUT,
            max_query=max(longest * form.query_share // 4, 1),
            max_pair=max(longest - ("bos_token" in variables), 1),
        )
    answers = [_find_answer(tokenizer, word) for word in form.answers]
    spec = ScoreSpec(labels=("LABEL_0",), activation="sigmoid", template=template)
    return Contract(
        encoder_path="",
        encoder=replace(encoder, max_positions=min(encoder.max_positions, length.tokens)),
        pooling=Pooling(),
        modules=(),
        dimension=0,
        max_tokens=length.tokens,
        max_tokens_at=(length.file, length.key),
        pad_id=encoder.pad_id,
        vocab_size=encoder.vocab_size,
        classifier=Classifier(spec=spec, pooling="lasttoken", out="lm_head", answers=make_answers(config, *answers)),
    )


def _read_config(folder: Path, name: str) -> JsonFile:
    config = read_object(folder, "config.json")
    if config is None:
        raise ModelFileError("is missing; this is not a transformers model, or it is incomplete", file="config.json")
    needed = FORMS[name].architecture
    if config.texts("architectures")[:1] != [needed]:
        found = ", ".join(config.texts("architectures")) or "none"
        raise config.refuse("architectures", f"must be {needed} for #reranker={name}, not {found}")
    return config


def _read_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    if not (folder / _TOKENIZER).is_file():
        raise ModelFileError("is missing: save the tokenizer again with transformers", file=_TOKENIZER)
    try:
        return Tokenizer.from_file(str(folder / _TOKENIZER))
    except Exception as error:  # the library raises plain Exception for everything that is wrong in the file
        raise ModelFileError(f"the tokenizer cannot be read: {error}", file=_TOKENIZER) from error


def _read_variables(folder: Path, form: _Form) -> dict[str, str]:
    """Return the template's variables, the first special token included where it has one."""
    if "bos_token" not in form.source:
        return form.texts
    names = ("special_tokens_map.json", "tokenizer_config.json")
    special = read_special_tokens(*(read_object(folder, name) for name in names))
    if "bos_token" not in special:
        raise ModelFileError("is missing: texts of this form of reranker begin with it", file=names[1], key="bos_token")
    return {"bos_token": special["bos_token"], **form.texts}


def _count_after(form: _Form, variables: dict[str, str], tokenizer: Tokenizer) -> int:
    """Return the tokens beside the pair that `longest` does not count."""
    if form.query_share is None:
        return 0
    beside = ["\n", *(text for name, text in variables.items() if name != "bos_token")]
    return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in beside)


def _find_answer(tokenizer: Tokenizer, word: str) -> int:
    """Return the first token of an answer."""
    ids = tokenizer.encode(word, add_special_tokens=False).ids
    if not ids:
        raise ModelFileError(f"has no token for the answer {word!r}", file=_TOKENIZER)
    return int(ids[0])
