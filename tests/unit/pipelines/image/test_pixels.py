"""Bytes to upright RGB: every mode against what Pillow or arithmetic says, and whatever is broken refused."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from shoal.errors import InvalidValue, ShoalError
from shoal.pipelines.image import pixels
from shoal.pipelines.image.budget import Budget
from shoal.pipelines.image.files import Header
from shoal.pipelines.image.pixels import decode, decode_channels
from shoal.types import Array
from tests.unit.pipelines.image.pictures import (
    animation,
    broken,
    chunk,
    deep,
    drawn,
    pictures,
    png_of,
    saved,
    turned,
    with_alpha,
)


def over_white(data: bytes) -> Array:
    """By Pillow's own means, the whole picture at once."""
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if "A" in picture.getbands() or "transparency" in picture.info:
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture.convert("RGBA"))
    return np.asarray(picture.convert("RGB"))


@pytest.fixture(params=["one strip", "many strips"])
def strips(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large pictures are flattened piece by piece; what comes of it must not depend on the pieces."""
    if request.param == "many strips":
        monkeypatch.setattr(pixels, "_STRIP", 1000)


@pytest.mark.usefixtures("strips")
@pytest.mark.parametrize("name", pictures())
def test_pixels_are_those_of_the_whole_picture(name: str) -> None:
    """To the bit, in RGB, upright, over white."""
    found = decode(pictures()[name])
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, over_white(pictures()[name]))


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("size", [(300, 200), (1, 9), (64, 64)])
def test_large_pictures_are_turned_by_channel(
    orientation: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bytes as at once."""
    data = turned(orientation, "PNG", size)
    whole = decode(data)
    monkeypatch.setattr(pixels, "_TURNED_WHOLE", 0)
    np.testing.assert_array_equal(decode(data), whole)


def test_what_is_hidden_does_not_shine_through() -> None:
    """A transparent pixel is white, whatever colour is written there; half of one is half white."""
    picture = Image.new("RGBA", (3, 1))
    for place, alpha in enumerate((0, 128, 255)):
        picture.putpixel((place, 0), (200, 0, 0, alpha))
    assert decode(saved(picture, "PNG")).tolist() == [[[255, 255, 255], [227, 127, 127], [200, 0, 0]]]


@pytest.mark.usefixtures("strips")
def test_sixteen_bits_are_scaled() -> None:
    """All 65536 levels, rounded; cutting them off at 255, as a plain conversion does, would make most of it white."""
    levels = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    found = decode(saved(Image.fromarray(levels), "PNG"))
    np.testing.assert_array_equal(found[..., 0], np.rint(levels / 257).astype(np.uint8))
    assert (found[..., 0] == found[..., 1]).all()
    assert (np.asarray(deep().convert("RGB")) == 255).mean() > 0.9


def test_sixteen_bits_with_a_transparent_grey() -> None:
    """It is white too."""
    levels = np.array([[0, 300, 65535]], dtype=np.uint16)
    data = saved(Image.fromarray(levels), "PNG")
    place = data.index(b"IDAT") - 4
    found = decode(data[:place] + chunk(b"tRNS", (300).to_bytes(2, "big")) + data[place:])
    assert found[0, :, 0].tolist() == [0, 255, 255]


def test_inks_of_adobe_are_not_taken_for_their_negative() -> None:
    """Photoshop writes CMYK JPEGs inverted and says so in a segment, as Pillow does."""
    paper = Image.new("CMYK", (16, 16), (0, 0, 0, 0))
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    data = saved(paper, "JPEG")
    assert b"Adobe" in data
    assert decode(data).min() > 250
    assert np.abs(decode(saved(red, "JPEG"))[0, 0].astype(int) - [255, 0, 0]).max() < 5


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_counts(kind: str) -> None:
    """Not the last."""
    first = drawn(240, 180, 0)
    found = decode(animation(kind)).astype(int)
    assert np.abs(found - np.asarray(first)).mean() < 20
    assert np.abs(found - np.asarray(drawn(240, 180, 2))).mean() > 25


def test_exif_behind_the_pixels_of_a_png() -> None:
    """Where its specification allows it, too."""
    data = turned(6, "PNG")
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    moved = data[:start] + data[end:-12] + data[start:end] + data[-12:]
    np.testing.assert_array_equal(decode(moved), decode(data))
    np.testing.assert_array_equal(decode(moved), over_white(moved))


@pytest.mark.parametrize("exif", [b"", b"II*\x00", b"MM\x00*\x00\x00\x00\x08\x00\x02" + bytes(5), b"junk" * 9])
def test_exif_that_cannot_be_read_turns_nothing(exif: bytes) -> None:
    """It is no reason to refuse a picture that everybody else shows."""
    picture = drawn(40, 30)
    np.testing.assert_array_equal(decode(saved(picture, "PNG", exif=b"Exif\x00\x00" + exif)), np.asarray(picture))


@pytest.mark.parametrize("order", ["little", "big"])
def test_exif_of_both_byte_orders(order: str) -> None:
    """Intel's and Motorola's; an orientation that does not exist is none."""
    for value, shape in ((6, (40, 30, 3)), (9, (30, 40, 3)), (0, (30, 40, 3))):
        assert order in ("little", "big")
        numbers = [
            number.to_bytes(size, "little" if order == "little" else "big")
            for number, size in ((8, 4), (1, 2), (0x0112, 2), (3, 2), (1, 4), (value, 2), (0, 2))
        ]
        exif = (b"II*\x00" if order == "little" else b"MM\x00*") + b"".join(numbers)
        assert decode(saved(drawn(40, 30), "PNG", exif=exif)).shape == shape


@pytest.mark.parametrize("name", broken())
def test_what_is_no_picture_is_refused(name: str) -> None:
    """In words that say what to send; nothing is guessed from half a file."""
    with pytest.raises(InvalidValue, match=r"send|convert|save") as caught:
        decode(broken()[name])
    assert caught.value.param == "input"


@pytest.mark.parametrize("error", [OSError, SyntaxError, MemoryError, EOFError, AssertionError, UserWarning])
def test_whatever_a_decoder_raises_is_the_file_s_fault(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even without a word, and warnings where they are errors."""

    def fails(file: object) -> None:
        raise error

    monkeypatch.setitem(pixels._READERS, "PNG", fails)
    with pytest.raises(InvalidValue, match=rf"broken PNG file \({error.__name__}\)"):
        decode(saved(drawn(4, 4), "PNG"))


def test_a_refusal_holds_no_picture() -> None:
    """Its error would keep the decoded pixels alive through its frames, outside of the budget."""
    with pytest.raises(InvalidValue) as caught:
        decode(broken()["half a PNG"])
    assert caught.value.__context__ is None
    trace = caught.value.__traceback__
    while trace is not None:
        assert not any(isinstance(value, Image.Image) for value in trace.tb_frame.f_locals.values())
        trace = trace.tb_next


@given(st.sampled_from(sorted(pictures())), st.data())
def test_damaged_files_give_pixels_or_a_refusal(name: str, data: st.DataObject) -> None:
    """Bytes changed, cut out and put in anywhere: never another error."""
    whole = bytearray(pictures()[name][:20_000])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole)))
        whole[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    with contextlib.suppress(ShoalError):
        assert decode(bytes(whole)).shape[2] == 3


@given(
    st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x00\x00\x00\x00WEBPVP8 ", b"GIF89a", b"BM"]),
    st.binary(),
)
def test_random_bytes_are_refused(magic: bytes, data: bytes) -> None:
    """Behind every magic."""
    with pytest.raises(ShoalError):
        decode(magic + data)


def test_a_picture_waits_for_room() -> None:
    """And is decoded once there is some; its own is given back."""
    budget = Budget(40 * 30 * 8)
    found: list[Array] = []
    data = saved(drawn(40, 30), "PNG")
    thread = threading.Thread(target=lambda: found.append(decode_channels(data, _same, budget=budget)))
    with budget.reserve(1):
        thread.start()
        assert not found
    thread.join(30)
    assert len(found) == 1
    with budget.reserve(budget.total):
        pass


def test_room_is_given_back_by_broken_pictures() -> None:
    """However many there are."""
    budget = Budget(320 * 240 * 10)
    for data in broken().values():
        with pytest.raises(ShoalError):
            decode_channels(data, _same, budget=budget)
    with budget.reserve(budget.total):
        pass


@pytest.mark.parametrize(
    ("kind", "options", "each"),
    [
        ("PNG", {}, 8),
        ("JPEG", {}, 8),
        ("WEBP", {}, 16),
    ],
)
def test_what_decoders_hold_is_counted(kind: str, options: dict[str, object], each: int) -> None:
    """So many bytes a pixel, and no picture that can never have them waits for them."""
    data = saved(drawn(40, 30), kind, **options)
    assert decode_channels(data, _same, budget=Budget(40 * 30 * each)).shape == (30, 40, 3)
    with pytest.raises(
        InvalidValue, match=f"need {1200 * each} bytes of memory, but only {1200 * each - 1} are allowed"
    ):
        decode_channels(data, _same, budget=Budget(40 * 30 * each - 1))


def test_coefficients_may_take_all_the_room_there_is() -> None:
    """A progressive JPEG waits until nothing else is decoded where they do not fit beside its pixels; where they fit
    they are counted, and where its pixels alone are too many it is refused as others are."""
    data = saved(drawn(40, 30), "JPEG", progressive=True, subsampling=0)
    for total, taken in ((40 * 30 * 11, 40 * 30 * 10), (40 * 30 * 9, 40 * 30 * 9)):
        budget = Watched(total)
        assert decode_channels(data, _same, budget=budget).shape == (30, 40, 3)
        assert budget.taken == [taken]
    with pytest.raises(InvalidValue, match="need 12000 bytes of memory, but only 9599 are allowed"):
        decode_channels(data, _same, budget=Budget(40 * 30 * 8 - 1))


class Watched(Budget):
    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.taken: list[int] = []

    def take(self, size: int) -> None:
        self.taken.append(size)
        super().take(size)


def test_drafts_of_jpegs_are_not_close_enough() -> None:
    """Why draft mode is not used: halved by the JPEG decoder, then resized to 224, single pixels are off by many
    levels where the picture has fine detail, and by more than one on average up to three times that size."""
    rng = np.random.default_rng(3)
    noise = Image.fromarray(rng.integers(0, 256, (1500, 2000, 3), dtype=np.uint8))
    large, small = (_drafted(saved(picture, "JPEG", quality=95)) for picture in (noise, noise.crop((0, 0, 900, 672))))
    assert large.max() > 1
    assert small.max() > 10
    assert small.mean() > 1


def _drafted(data: bytes) -> Array:
    def resized(draft: Callable[[Image.Image], object]) -> Array:
        picture = Image.open(io.BytesIO(data))
        size = picture.size
        draft(picture)
        return np.asarray(picture.resize((size[0] * 224 // size[1], 224), Image.Resampling.BICUBIC)).astype(int)

    halved = resized(lambda picture: picture.draft("RGB", (picture.width // 2, picture.height // 2)))
    apart: Array = np.abs(halved - resized(lambda picture: None))
    return apart


def _same(picture: Image.Image) -> Image.Image:
    return picture


def test_a_header_that_lies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was checked must be what is decoded."""
    data = png_of(4, 4)
    monkeypatch.setattr(pixels, "read_header", lambda content: Header("PNG", 5, 5, content))
    with pytest.raises(InvalidValue, match="differs from its header"):
        decode(data)


def test_alpha_of_large_pictures_is_flattened_in_place() -> None:
    """No second picture of four bytes a pixel."""
    picture = with_alpha(drawn(30, 20))
    assert pixels._flatten(picture) is picture
    grey = with_alpha(drawn(30, 20)).convert("LA")
    assert pixels._flatten(grey).mode == "L"
