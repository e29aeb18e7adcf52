"""Models in one file: their headers, and the settings derived from them."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shoal.errors import ModelFileError
from shoal.models.gguf import Gguf, build_settings, read_gguf, write_settings
from tests.fixtures import tiny_gguf
from tests.work import count_lines

FIXTURES = Path(__file__).parents[2] / "fixtures"
TINY = FIXTURES / "tiny_llama.gguf"
TEXTS = ["Hello, world!", "naïve 東京 नमस्ते", "<|im_start|>user\nthree  spaces   <|im_end|>", "12345 \t\n\n x", ""]
KINDS = {bool: 7, int: 11, float: 12}
HEADER = TINY.read_bytes().index(b"token_embd.weight") + 200
KEYS = [*sorted(read_gguf(TINY).metadata), "split.count", "tokenizer.ggml.eot_token_id", "llama.attention.key_length"]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=9),
    st.lists(st.integers(-9, 9), max_size=3),
    st.lists(st.text(max_size=3), max_size=3),
)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def encode(value: Any) -> bytes:
    """Encode a value after its type."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        if value and isinstance(value[0], str):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    kind = KINDS[type(value)]
    return struct.pack(f"<I{'?qd'[[7, 11, 12].index(kind)]}", kind, value)


def write(
    path: Path,
    metadata: dict[str, Any],
    *,
    kind: int = 0,
    version: int = 3,
    cut: int = 0,
    shape: tuple[int, ...] = (2, 448),
) -> Path:
    """Write a file with one tensor, by default with 2 x 448 weights."""
    head = b"GGUF" + struct.pack("<IQQ", version, 1, len(metadata))
    head += b"".join(text(key) + encode(value) for key, value in metadata.items())
    head += text("token_embd.weight") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0)
    head += bytes(-len(head) % 32)
    data = head + bytes(2 * 448 * 4)
    path.write_bytes(data[: len(data) - cut])
    return path


@pytest.fixture
def metadata() -> dict[str, Any]:
    return dict(read_gguf(TINY).metadata)


class TestHeader:
    def test_the_tiny_model(self) -> None:
        """Two layers with four heads of size eight."""
        model = read_gguf(TINY)
        assert (model.architecture, model.vocab_size, model.parameters) == ("llama", 448, 49312)
        assert model.cache_heads == ((4, 8),) * 4
        assert model.number("context_length") == 2048
        assert len(model.metadata["tokenizer.ggml.tokens"]) == 448

    def test_values_of_every_kind(self, tmp_path: Path, metadata: dict[str, Any]) -> None:
        """Numbers, booleans, texts and lists are read back unchanged."""
        more = metadata | {"a": -5, "b": True, "c": 0.5, "d": "ñ", "e": ["x", ""], "f": [1, -2], "g": []}
        assert read_gguf(write(tmp_path / "x.gguf", more)).metadata == more

    @pytest.mark.parametrize(
        ("changes", "how", "match"),
        [
            ({"general.architecture": "gemma"}, {}, r"general\.architecture: 'gemma' is not supported as GGUF"),
            ({"split.count": 2}, {}, r"one of 2 parts .*NAME-00001-of-00002\.gguf.*`llama-gguf-split --merge"),
            ({}, {"kind": 11}, r"token_embd\.weight: has weights of type 11: use the file in Q4_0"),
            ({"split.count": "two"}, {}, r"split\.count: must be a whole number, not 'two'"),
            ({"general.alignment": 0}, {}, r"general\.alignment: must be a power of two up to 1048576, not 0"),
            ({"general.alignment": 48}, {}, r"general\.alignment: .* not 48"),
            ({"general.alignment": 2**21}, {}, r"general\.alignment: .* not 2097152"),
            ({"general.alignment": -32}, {}, r"general\.alignment: .* not -32"),
            ({"general.alignment": "wide"}, {}, r"general\.alignment: .* not 'wide'"),
            ({"general.alignment": True}, {}, r"general\.alignment: .* not True"),
            ({"general.architecture": [1] * 1000}, {}, r"general\.architecture: .{60}\.\.\. is not supported"),
            ({}, {"shape": ()}, r"token_embd\.weight: has 0 dimensions instead of 1 to 4"),
            ({}, {"shape": (1,) * 5}, r"token_embd\.weight: has 5 dimensions"),
            ({}, {"shape": (2**63,) * 4}, "truncated: it has"),
            ({}, {"shape": (0, 2**40)}, r"token_embd\.weight: holds no weights"),
            ({}, {"version": 1}, "version 1"),
            ({}, {"cut": 1}, "truncated: it has"),
            ({}, {"cut": 3700}, "truncated or broken"),
        ],
    )
    def test_unsupported_files(
        self, tmp_path: Path, metadata: dict[str, Any], changes: dict[str, Any], how: dict[str, Any], match: str
    ) -> None:
        """Each is refused with the file, the position and the alternative."""
        with pytest.raises(ModelFileError, match=match) as caught:
            read_gguf(write(tmp_path / "x.gguf", metadata | changes, **how))
        assert caught.value.file == "x.gguf"

    def test_parts_of_a_split_model(self, tmp_path: Path) -> None:
        """The first one names the others; their tensors are those of one file."""
        model = tiny_gguf.model("llama")
        whole = read_gguf(model.write(tmp_path / "m.gguf"))
        parts = model.write_parts(tmp_path, "m", 3)
        joined = read_gguf(parts[0])
        assert (joined.tensors, joined.parameters, joined.vocab_size) == (
            whole.tensors,
            whole.parameters,
            whole.vocab_size,
        )
        model.write_parts(tmp_path, "other", 2)[1].rename(parts[1])
        with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf: split\.count: must be 3, as in"):
            read_gguf(parts[0])
        parts[1].unlink()
        with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf: is missing"):
            read_gguf(parts[0])
        with pytest.raises(ModelFileError, match=r"general\.architecture"):
            read_gguf(parts[2])

    def test_parts_that_do_not_belong_together(self, tmp_path: Path) -> None:
        """A part in the place of another, and parts that hold a tensor twice."""
        model = tiny_gguf.model("llama")
        parts = model.write_parts(tmp_path, "m", 3)
        own = parts[1].read_bytes()
        parts[1].write_bytes(parts[2].read_bytes())
        with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf: split\.no: must be 1"):
            read_gguf(parts[0])
        parts[1].write_bytes(own)
        last = tiny_gguf.Model(model.architecture, model.layers, {}, dict(list(model.tensors.items())[:8]))
        last.metadata |= {"split.no": np.uint16(2), "split.count": np.uint16(3)}
        last.write(parts[2])
        with pytest.raises(ModelFileError, match=r"split\.tensors\.count: is \d+, but the parts hold .* fetch all"):
            read_gguf(parts[0])

    def test_something_else(self, tmp_path: Path) -> None:
        """A web page with this file name."""
        (tmp_path / "x.gguf").write_text("<html>")
        with pytest.raises(ModelFileError, match="not a GGUF file"):
            read_gguf(tmp_path / "x.gguf")

    @hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.binary(max_size=200))
    def test_noise_is_refused(self, tmp_path: Path, data: bytes) -> None:
        """Any bytes after the magic number are read or refused, without other errors."""
        (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<I", 3) + data)
        with pytest.raises(ModelFileError):
            read_gguf(tmp_path / "x.gguf")

    def test_two_million_dimensions(self, tmp_path: Path) -> None:
        """The number of dimensions is refused; computing their product would time out."""
        tensor = text("t") + struct.pack("<I", 2_000_000) + b"\xff" * 16_000_000 + struct.pack("<IQ", 0, 0)
        (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor)
        with pytest.raises(ModelFileError, match="t: has 2000000 dimensions"):
            read_gguf(tmp_path / "x.gguf")

    @pytest.mark.parametrize(
        ("tensors", "pairs", "rest"),
        [
            (2**64 - 1, 0, b""),
            (0, 2**64 - 1, b""),
            (0, 1, struct.pack("<Q", 2**63)),
            (0, 1, text("a") + struct.pack("<IIQ", 9, 8, 2**64 - 1)),
            (0, 1, text("a") + struct.pack("<IIQ", 9, 0, 2**31 - 1)),
        ],
    )
    def test_numbers_beyond_all_models(self, tmp_path: Path, tensors: int, pairs: int, rest: bytes) -> None:
        """A file of zeros with an excessive header is refused before it is read."""
        head = b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + rest
        (tmp_path / "x.gguf").write_bytes(head + bytes(10_000_000))

        def refused() -> None:
            with pytest.raises(ModelFileError, match="a length of"):
                read_gguf(tmp_path / "x.gguf")

        assert count_lines(refused) < 2000

    @hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        flips=st.lists(st.tuples(st.integers(0, HEADER - 1), st.integers(0, 7)), max_size=6),
        cut=st.none() | st.integers(0, HEADER),
    )
    def test_a_header_that_was_damaged(self, tmp_path: Path, flips: list[tuple[int, int]], cut: int | None) -> None:
        """Flipped bits and truncated files give a model or one type of error."""
        data = bytearray(TINY.read_bytes()[:cut])
        for at, bit in flips:
            if at < len(data):
                data[at] ^= 1 << bit
        (tmp_path / "x.gguf").write_bytes(data)
        with contextlib.suppress(ModelFileError):
            model = read_gguf(tmp_path / "x.gguf")
            assert len(model.cache_heads) <= 2**15
            assert json.dumps(build_settings(model))

    @given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
    def test_values_of_another_type(self, changes: dict[str, Any]) -> None:
        """Each is refused by its key or ignored."""
        model = Gguf("x.gguf", read_gguf(TINY).metadata | changes, 0, 448)
        with contextlib.suppress(ModelFileError):
            assert json.dumps(build_settings(model))
            assert len(model.cache_heads) <= 2**15

    @pytest.mark.parametrize("value", [0, -1, True, 1.5, "two", 2**31])
    def test_numbers_that_are_none(self, value: Any) -> None:
        """A size must be a positive integer; the error names the key."""
        model = Gguf("x.gguf", {"general.architecture": "llama", "llama.block_count": value}, 0, 0)
        with pytest.raises(ModelFileError, match=r"llama\.block_count"):
            model.number("block_count")


class TestSettings:
    def test_the_tokenizer_is_the_one_it_was_made_from(self, tmp_path: Path) -> None:
        """Every text has the ids of the model's own tokenizer.json and decodes back."""
        write_settings(read_gguf(TINY), tmp_path)
        tiny_tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        own = Tokenizer.from_file(str(FIXTURES / "tiny_llama_ir" / "tokenizer.json"))
        for one in TEXTS:
            assert tiny_tokenizer.encode(one).ids == own.encode(one).ids
            assert (
                tiny_tokenizer.encode(one, add_special_tokens=False).ids
                == own.encode(one, add_special_tokens=False).ids
            )
            assert tiny_tokenizer.decode(tiny_tokenizer.encode(one).ids) == own.decode(own.encode(one).ids)

    def test_the_other_files(self, tmp_path: Path) -> None:
        """Special tokens, chat template, sizes and end tokens."""
        write_settings(read_gguf(TINY), tmp_path)
        read = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
        chat = json.loads((FIXTURES / "tiny_llama_ir" / "tokenizer_config.json").read_text())["chat_template"]
        own = read["tokenizer_config.json"]
        assert (own["bos_token"], own["eos_token"], own["chat_template"]) == ("<s>", "<|im_end|>", chat)
        assert "pad_token" not in own
        assert read["config.json"]["max_position_embeddings"] == 2048
        assert read["config.json"]["architectures"] == ["LlamaForCausalLM"]
        assert read["generation_config.json"] == {"eos_token_id": [4]}

    def test_files_that_are_there_stay(self, tmp_path: Path) -> None:
        """Files next to the weights take precedence."""
        (tmp_path / "generation_config.json").write_text("{}")
        write_settings(read_gguf(TINY), tmp_path)
        assert (tmp_path / "generation_config.json").read_text() == "{}"
        assert (tmp_path / "config.json").is_file()
        (tmp_path / "config.json").unlink()
        write_settings(read_gguf(TINY), tmp_path)
        assert not (tmp_path / "config.json").exists()

    @pytest.mark.parametrize(
        ("way", "pieces"),
        [
            ("gpt-2", ["ab", " 1234", "5"]),
            ("llama-bpe", ["ab", " ", "123", "45"]),
            ("qwen2", ["ab", " ", "1", "2", "3", "4", "5"]),
            ("smollm", ["ab", " ", "1", "2", "3", "4", "5"]),
        ],
    )
    def test_how_texts_are_cut(self, metadata: dict[str, Any], way: str, pieces: list[str]) -> None:
        """Each family splits numbers differently."""
        model = Gguf("x", metadata | {"tokenizer.ggml.pre": way}, 0, 448)
        tiny_tokenizer = Tokenizer.from_str(json.dumps(build_settings(model)["tokenizer.json"]))
        assert tiny_tokenizer.pre_tokenizer is not None
        cut = [
            "".join(piece).replace("Ġ", " ") for piece, _ in tiny_tokenizer.pre_tokenizer.pre_tokenize_str("ab 12345")
        ]
        assert cut == (["ab", " 12345"] if way == "gpt-2" else pieces)

    def test_where_texts_begin(self, metadata: dict[str, Any]) -> None:
        """With the start token if the file says so, or if the family always has it."""

        def begins(**changes: Any) -> bool:
            changed = {key: value for key, value in (metadata | changes).items() if value is not None}
            return build_settings(Gguf("x", changed, 0, 448))["tokenizer.json"]["post_processor"] is not None

        key, way = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.pre"
        assert begins()
        assert not begins(**{key: False})
        assert not begins(**{key: None})
        assert begins(**{key: None, way: "llama-bpe"})
        assert not begins(**{"tokenizer.ggml.bos_token_id": None})

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.model"),
            ({"tokenizer.ggml.pre": "novel"}, r"tokenizer\.ggml\.pre: 'novel'.*tokenizer\.json"),
            ({"tokenizer.ggml.pre": "default"}, r"tokenizer\.ggml\.pre: 'default'.*tokenizer\.json"),
            ({"tokenizer.ggml.add_eos_token": True}, r"tokenizer\.ggml\.add_eos_token: .*tokenizer\.json"),
            ({"tokenizer.ggml.tokens": []}, r"tokenizer\.ggml\.tokens: is missing"),
            ({"tokenizer.ggml.merges": [1]}, r"tokenizer\.ggml\.merges: is missing"),
            ({"tokenizer.ggml.merges": ["ab"]}, r"tokenizer\.ggml\.merges: 'ab' does not join two known tokens"),
            ({"tokenizer.ggml.merges": ["a \u0100"]}, r"tokenizer\.ggml\.merges: .* does not join two known tokens"),
            ({"tokenizer.ggml.token_type": [1]}, r"tokenizer\.ggml\.token_type: must be a list of 448 numbers"),
            ({"tokenizer.ggml.token_type": 7}, r"tokenizer\.ggml\.token_type: must be a list of 448 numbers"),
            ({"tokenizer.ggml.token_type": ["x"] * 448}, r"tokenizer\.ggml\.token_type: must be a list"),
            ({"tokenizer.ggml.add_bos_token": 2}, r"tokenizer\.ggml\.add_bos_token: must be true or false"),
            ({"tokenizer.chat_template": 5}, r"tokenizer\.chat_template: must be a text, not 5"),
            ({"llama.block_count": 2**20}, r"llama\.block_count: must be a whole number above 0, and at most 16384"),
        ],
    )
    def test_vocabularies_that_are_not_known(
        self, metadata: dict[str, Any], changes: dict[str, Any], match: str
    ) -> None:
        """They are refused, not guessed."""
        with pytest.raises(ModelFileError, match=match):
            build_settings(Gguf("x.gguf", metadata | changes, 0, 448))
