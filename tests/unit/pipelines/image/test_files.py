"""Image headers: the format by its first bytes, the size, and refused files."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shoal.errors import InvalidValue, ShoalError
from shoal.pipelines.image.files import MAX_PIXELS, MAX_SIDE, read_header
from tests.unit.pipelines.image.image_kit import (
    animation,
    bombs,
    chunk,
    drawn,
    image_files,
    many_scans,
    png_of,
    saved,
)


@pytest.mark.parametrize("name", image_files())
def test_sizes_are_those_that_pillow_reads(name: str) -> None:
    """Size and format match for the original file and the stripped one."""
    header = read_header(image_files()[name])
    for data in (image_files()[name], header.data):
        with Image.open(io.BytesIO(data)) as image:
            assert (image.format, *image.size) == (header.format, header.width, header.height)


@pytest.mark.parametrize("name", bombs())
def test_bombs_are_known_by_their_headers(name: str) -> None:
    """Except the bomb in a text chunk, which is stripped."""
    if name == "PNG whose pixels are text":
        assert len(read_header(bombs()[name]).data) < 200
        return
    with pytest.raises(InvalidValue) as caught:
        read_header(bombs()[name])
    assert caught.value.param == "input"


def test_errors_name_the_limit_and_the_actual_size() -> None:
    """The error has both numbers and the next step."""
    with pytest.raises(InvalidValue, match=rf"8001 x 5000 = 40005000 pixels, but at most {MAX_PIXELS} are allowed"):
        read_header(png_of(8001, 5000))
    with pytest.raises(InvalidValue, match="JPEG, PNG, WebP, GIF or BMP"):
        read_header(b"<svg/>")
    with pytest.raises(InvalidValue, match="no bytes: send a JPEG"):
        read_header(b"")


def test_limits_are_inclusive() -> None:
    """40 million pixels are accepted."""
    assert read_header(png_of(8000, 5000)).width == 8000
    assert read_header(png_of(MAX_SIDE, 1)).width == MAX_SIDE


def test_only_the_first_image_is_kept() -> None:
    """Text, profiles and later frames never reach a decoder."""
    noted = png_of(4, 4, chunk(b"tEXt", b"a\x00b"), chunk(b"IDAT", b""), chunk(b"acTL", bytes(8)))
    assert read_header(noted).data == png_of(4, 4, chunk(b"IDAT", b""))
    still = read_header(animation("GIF", comment=b"hello" * 300))
    assert b"hello" not in still.data
    with Image.open(io.BytesIO(still.data)) as image:
        assert getattr(image, "n_frames", 1) == 1


def test_scans_cost_memory_and_time() -> None:
    """With several scans, libjpeg keeps two bytes per coefficient; a hundred scans are allowed."""
    image = drawn(64, 64)
    assert read_header(saved(image, "JPEG")).pixel_bytes == 4
    assert read_header(saved(image, "JPEG", progressive=True, subsampling=0)).pixel_bytes == 10
    assert read_header(saved(image, "JPEG", progressive=True, subsampling=2)).pixel_bytes == 7
    assert read_header(many_scans(80)).pixel_bytes > 4
    with pytest.raises(InvalidValue, match="but at most 100 are allowed"):
        read_header(many_scans(101))


def test_scans_of_a_preview_do_not_count() -> None:
    """A JPEG within a segment is not part of the image."""
    image = saved(drawn(64, 64), "JPEG")
    preview = b"\xff\xd9" + many_scans(120)[:60_000]
    segment = b"\xff\xe5" + (len(preview) + 2).to_bytes(2, "big") + preview
    assert read_header(image[:2] + segment + image[2:]).pixel_bytes == 4


def test_two_frames_are_refused() -> None:
    """The size must not depend on the decoder's choice of frame."""
    image = saved(drawn(64, 64), "JPEG")
    start = image.index(b"\xff\xc0")
    frame = image[start : start + 2 + int.from_bytes(image[start + 2 : start + 4], "big")]
    with pytest.raises(InvalidValue, match="two frames"):
        read_header(image[:start] + frame + image[start:])


def test_a_frame_without_channels_is_refused() -> None:
    image = bytearray(saved(drawn(64, 64), "JPEG"))
    image[image.index(b"\xff\xc0") + 9] = 0
    with pytest.raises(InvalidValue, match="no color channels"):
        read_header(bytes(image))


@given(start=st.sampled_from(sorted(image_files())), cut=st.floats(0, 1), tail=st.binary(max_size=64))
def test_any_bytes_give_a_header_or_a_refusal(start: str, cut: float, tail: bytes) -> None:
    """No other error, and no size over the limit."""
    data = image_files()[start]
    try:
        header = read_header(data[: int(len(data) * cut)] + tail)
    except ShoalError:
        return
    assert 0 < header.width * header.height <= MAX_PIXELS
