"""Images that callers hold, or whose files they name."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as pillow

from shoal.errors import InvalidValue
from shoal.pipelines.image.files import read_header
from shoal.python.images import check_head, check_image_file, read_image_file, to_image
from shoal.types import Image
from tests.unit.drawn import FORMATS, file_of


class TestArguments:
    def test_bytes_and_paths(self, tmp_path: Path) -> None:
        """For every bytes type of Python; paths are not read yet."""
        data = file_of()
        for value in (data, bytearray(data), memoryview(data), Image(data)):
            assert to_image(value) == Image(data)
        assert to_image(tmp_path / "a.png") == tmp_path / "a.png"

    @pytest.mark.parametrize("value", ["a.png", None, 3, [1, 2], np.zeros(3), object()])
    def test_values_that_are_not_images(self, value: object) -> None:
        """A str is always a text."""
        assert to_image(value) is None

    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
    def test_pillow_images_keep_their_pixels(self, mode: str) -> None:
        drawn = pillow.effect_noise((9, 7), 80).convert("RGB").convert("L" if mode == "I;16" else mode)
        drawn = drawn.convert("I;16") if mode == "I;16" else drawn
        image = to_image(drawn)
        assert isinstance(image, Image)
        assert np.array_equal(np.asarray(pillow.open(io.BytesIO(image.data))), np.asarray(drawn))

    def test_an_unsupported_pillow_mode_is_refused(self) -> None:
        """The error has the next step."""
        with pytest.raises(InvalidValue, match=r"mode CMYK .*convert\('RGB'\)"):
            to_image(pillow.new("CMYK", (2, 2)))

    def test_pillow_is_not_imported(self) -> None:
        code = "import sys, shoal.python.images as p; assert p.to_image([1]) is None; print('PIL' in sys.modules)"
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert process.stdout.strip() == "False"


class TestFiles:
    @pytest.mark.parametrize("form", FORMATS)
    def test_supported_formats_are_recognized(self, form: str, tmp_path: Path) -> None:
        """The formats are those of the pipeline."""
        path = tmp_path / "image"
        path.write_bytes(file_of(form=form))
        assert check_image_file(path) == path
        assert read_header(read_image_file(path).data).format == form

    @pytest.mark.parametrize("head", [b"%PDF-1.7", b"<svg/>", b"RIFF\0\0\0\0WAVE", b"II*\0", b"P6 1 1", b"\xff\xd8"])
    def test_other_formats_are_refused(self, head: bytes) -> None:
        """As in the pipeline."""
        with pytest.raises(InvalidValue, match=r"^a\.bin is not an image: pass a JPEG, PNG"):
            check_head(head, "a.bin")
        with pytest.raises(InvalidValue):
            read_header(head + bytes(100))

    def test_files_that_cannot_be_read_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "empty.png").touch()
        with pytest.raises(InvalidValue, match=r"nowhere\.png cannot be read: No such file or directory"):
            check_image_file(tmp_path / "nowhere.png")
        with pytest.raises(InvalidValue, match=r"nowhere\.png cannot be read: No such file"):
            read_image_file(tmp_path / "nowhere.png")
        with pytest.raises(InvalidValue, match="cannot be read: Is a directory"):
            check_image_file(tmp_path)
        with pytest.raises(InvalidValue, match=r"empty\.png is empty"):
            check_image_file(tmp_path / "empty.png")

    def test_a_pipe_is_read_at_once(self) -> None:
        """Its bytes can be read only once."""
        for data in (file_of(), b"text"):
            out, into = os.pipe()
            os.write(into, data)
            os.close(into)
            path = Path(f"/dev/fd/{out}")
            if data == b"text":
                with pytest.raises(InvalidValue, match="is not an image: pass"):
                    check_image_file(path)
            else:
                assert check_image_file(path) == Image(data)
            os.close(out)
