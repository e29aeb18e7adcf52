"""Bytes to upright RGB: every mode compared with Pillow or arithmetic; broken files are refused."""

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
from tests.unit.pipelines.image.image_kit import (
    animation,
    broken,
    chunk,
    deep,
    drawn,
    image_files,
    png_of,
    saved,
    turned,
    with_alpha,
)


def over_white(data: bytes) -> Array:
    """Flatten the whole image at once with Pillow."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if "A" in image.getbands() or "transparency" in image.info:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))


@pytest.fixture(params=["one strip", "many strips"])
def strips(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large images are flattened in strips; the result must not depend on the strips."""
    if request.param == "many strips":
        monkeypatch.setattr(pixels, "_STRIP", 1000)


@pytest.mark.usefixtures("strips")
@pytest.mark.parametrize("name", image_files())
def test_pixels_are_those_of_the_whole_image(name: str) -> None:
    """Bit for bit, in RGB, upright, over white."""
    decoded = decode(image_files()[name])
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, over_white(image_files()[name]))


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("size", [(300, 200), (1, 9), (64, 64)])
def test_large_images_are_turned_by_channel(
    orientation: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is equal to rotation at once."""
    data = turned(orientation, "PNG", size)
    whole = decode(data)
    monkeypatch.setattr(pixels, "_TURNED_WHOLE", 0)
    np.testing.assert_array_equal(decode(data), whole)


def test_transparent_colors_do_not_shine_through() -> None:
    """A transparent pixel is white whatever its color; a half-transparent one is half white."""
    image = Image.new("RGBA", (3, 1))
    for place, alpha in enumerate((0, 128, 255)):
        image.putpixel((place, 0), (200, 0, 0, alpha))
    assert decode(saved(image, "PNG")).tolist() == [[[255, 255, 255], [227, 127, 127], [200, 0, 0]]]


@pytest.mark.usefixtures("strips")
def test_sixteen_bits_are_scaled() -> None:
    """All 65536 levels are rounded; clipping at 255, as a plain conversion does, would make most of them white."""
    levels = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    decoded = decode(saved(Image.fromarray(levels), "PNG"))
    np.testing.assert_array_equal(decoded[..., 0], np.rint(levels / 257).astype(np.uint8))
    assert (decoded[..., 0] == decoded[..., 1]).all()
    assert (np.asarray(deep().convert("RGB")) == 255).mean() > 0.9


def test_sixteen_bits_with_a_transparent_grey() -> None:
    """The transparent gray becomes white."""
    levels = np.array([[0, 300, 65535]], dtype=np.uint16)
    data = saved(Image.fromarray(levels), "PNG")
    place = data.index(b"IDAT") - 4
    decoded = decode(data[:place] + chunk(b"tRNS", (300).to_bytes(2, "big")) + data[place:])
    assert decoded[0, :, 0].tolist() == [0, 255, 255]


def test_inks_of_adobe_are_not_taken_for_their_negative() -> None:
    """Photoshop writes inverted CMYK JPEGs and marks them in a segment, as Pillow does."""
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
    decoded = decode(animation(kind)).astype(int)
    assert np.abs(decoded - np.asarray(first)).mean() < 20
    assert np.abs(decoded - np.asarray(drawn(240, 180, 2))).mean() > 25


def test_exif_behind_the_pixels_of_a_png() -> None:
    """The PNG specification allows it there, too."""
    data = turned(6, "PNG")
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    moved = data[:start] + data[end:-12] + data[start:end] + data[-12:]
    np.testing.assert_array_equal(decode(moved), decode(data))
    np.testing.assert_array_equal(decode(moved), over_white(moved))


@pytest.mark.parametrize("exif", [b"", b"II*\x00", b"MM\x00*\x00\x00\x00\x08\x00\x02" + bytes(5), b"junk" * 9])
def test_exif_that_cannot_be_read_turns_nothing(exif: bytes) -> None:
    """Other viewers show such an image, so it is not refused."""
    image = drawn(40, 30)
    np.testing.assert_array_equal(decode(saved(image, "PNG", exif=b"Exif\x00\x00" + exif)), np.asarray(image))


@pytest.mark.parametrize("order", ["little", "big"])
def test_exif_of_both_byte_orders(order: str) -> None:
    """Intel and Motorola; an invalid orientation is ignored."""
    for value, shape in ((6, (40, 30, 3)), (9, (30, 40, 3)), (0, (30, 40, 3))):
        assert order in ("little", "big")
        numbers = [
            number.to_bytes(size, "little" if order == "little" else "big")
            for number, size in ((8, 4), (1, 2), (0x0112, 2), (3, 2), (1, 4), (value, 2), (0, 2))
        ]
        exif = (b"II*\x00" if order == "little" else b"MM\x00*") + b"".join(numbers)
        assert decode(saved(drawn(40, 30), "PNG", exif=exif)).shape == shape


@pytest.mark.parametrize("name", broken())
def test_invalid_images_are_refused(name: str) -> None:
    """The error states which files are accepted; truncated files are not completed."""
    with pytest.raises(InvalidValue, match=r"send|convert|save") as caught:
        decode(broken()[name])
    assert caught.value.param == "input"


@pytest.mark.parametrize("error", [OSError, SyntaxError, MemoryError, EOFError, AssertionError, UserWarning])
def test_whatever_a_decoder_raises_is_the_file_s_fault(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also errors without a message, and warnings turned into errors."""

    def fails(file: object) -> None:
        raise error

    monkeypatch.setitem(pixels._READERS, "PNG", fails)
    with pytest.raises(InvalidValue, match=rf"broken PNG file \({error.__name__}\)"):
        decode(saved(drawn(4, 4), "PNG"))


def test_a_refusal_holds_no_image() -> None:
    """The frames of the error would keep the decoded pixels alive outside of the budget."""
    with pytest.raises(InvalidValue) as caught:
        decode(broken()["half a PNG"])
    assert caught.value.__context__ is None
    trace = caught.value.__traceback__
    while trace is not None:
        assert not any(isinstance(value, Image.Image) for value in trace.tb_frame.f_locals.values())
        trace = trace.tb_next


@given(st.sampled_from(sorted(image_files())), st.data())
def test_damaged_files_give_pixels_or_a_refusal(name: str, data: st.DataObject) -> None:
    """Bytes are changed, removed and inserted anywhere; no other error is raised."""
    whole = bytearray(image_files()[name][:20_000])
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
    """After every magic number."""
    with pytest.raises(ShoalError):
        decode(magic + data)


def test_an_image_waits_for_room() -> None:
    """It is decoded once memory is available and returns its own afterwards."""
    budget = Budget(40 * 30 * 8)
    results: list[Array] = []
    data = saved(drawn(40, 30), "PNG")
    thread = threading.Thread(target=lambda: results.append(decode_channels(data, _same, budget=budget)))
    with budget.reserve(1):
        thread.start()
        assert not results
    thread.join(30)
    assert len(results) == 1
    with budget.reserve(budget.total):
        pass


def test_room_is_given_back_by_broken_images() -> None:
    """For any number of them."""
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
def test_decoder_memory_is_counted(kind: str, options: dict[str, object], each: int) -> None:
    """By bytes per pixel; an image that can never fit is refused without waiting."""
    data = saved(drawn(40, 30), kind, **options)
    assert decode_channels(data, _same, budget=Budget(40 * 30 * each)).shape == (30, 40, 3)
    with pytest.raises(
        InvalidValue, match=f"need {1200 * each} bytes of memory, but only {1200 * each - 1} are allowed"
    ):
        decode_channels(data, _same, budget=Budget(40 * 30 * each - 1))


def test_coefficients_may_take_all_the_room_there_is() -> None:
    """A progressive JPEG waits to be decoded alone if its coefficients do not fit beside its pixels; if they fit they
    are counted, and if its pixels alone are too many it is refused."""
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
    """The reason against draft mode: after halving by the JPEG decoder and a resize to 224, single pixels with fine
    detail are off by many levels, and by more than one on average up to three times that size."""
    rng = np.random.default_rng(3)
    noise = Image.fromarray(rng.integers(0, 256, (1500, 2000, 3), dtype=np.uint8))
    large, small = (_drafted(saved(image, "JPEG", quality=95)) for image in (noise, noise.crop((0, 0, 900, 672))))
    assert large.max() > 1
    assert small.max() > 10
    assert small.mean() > 1


def _drafted(data: bytes) -> Array:
    def resized(draft: Callable[[Image.Image], object]) -> Array:
        image = Image.open(io.BytesIO(data))
        size = image.size
        draft(image)
        return np.asarray(image.resize((size[0] * 224 // size[1], 224), Image.Resampling.BICUBIC)).astype(int)

    halved = resized(lambda image: image.draft("RGB", (image.width // 2, image.height // 2)))
    apart: Array = np.abs(halved - resized(lambda image: None))
    return apart


def _same(image: Image.Image) -> Image.Image:
    return image


def test_a_header_that_lies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checked size must be the decoded size."""
    data = png_of(4, 4)
    monkeypatch.setattr(pixels, "read_header", lambda content: Header("PNG", 5, 5, content))
    with pytest.raises(InvalidValue, match="differs from its header"):
        decode(data)


def test_alpha_of_large_images_is_flattened_in_place() -> None:
    """Without a second image of four bytes per pixel."""
    image = with_alpha(drawn(30, 20))
    assert pixels._flatten(image) is image
    grey = with_alpha(drawn(30, 20)).convert("LA")
    assert pixels._flatten(grey).mode == "L"
