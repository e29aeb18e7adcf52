"""Pictures that callers hold, or whose files they name."""

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
from shoal.python.images import check_head, check_picture, picture_of, read_picture
from shoal.types import Image
from tests.unit.drawn import FORMATS, file_of


class TestArguments:
    def test_bytes_and_paths(self, tmp_path: Path) -> None:
        """Of every kind that Python has; paths are not read yet."""
        data = file_of()
        for value in (data, bytearray(data), memoryview(data), Image(data)):
            assert picture_of(value) == Image(data)
        assert picture_of(tmp_path / "a.png") == tmp_path / "a.png"

    @pytest.mark.parametrize("value", ["a.png", None, 3, [1, 2], np.zeros(3), object()])
    def test_what_is_no_picture(self, value: object) -> None:
        """A str is a text, whatever it says."""
        assert picture_of(value) is None

    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
    def test_those_of_pillow_keep_their_pixels(self, mode: str) -> None:
        drawn = pillow.effect_noise((9, 7), 80).convert("RGB").convert("L" if mode == "I;16" else mode)
        drawn = drawn.convert("I;16") if mode == "I;16" else drawn
        found = picture_of(drawn)
        assert isinstance(found, Image)
        assert np.array_equal(np.asarray(pillow.open(io.BytesIO(found.data))), np.asarray(drawn))

    def test_one_of_pillow_that_has_no_file(self) -> None:
        """What to do is said."""
        with pytest.raises(InvalidValue, match=r"mode CMYK .*convert\('RGB'\)"):
            picture_of(pillow.new("CMYK", (2, 2)))

    def test_without_pillow_nothing_is_loaded(self) -> None:
        code = "import sys, shoal.python.images as p; assert p.picture_of([1]) is None; print('PIL' in sys.modules)"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "False"


class TestFiles:
    @pytest.mark.parametrize("form", FORMATS)
    def test_all_that_models_read_begin_rightly(self, form: str, tmp_path: Path) -> None:
        """The same formats as those of the pipeline."""
        path = tmp_path / "picture"
        path.write_bytes(file_of(form=form))
        assert check_picture(path) == path
        assert read_header(read_picture(path).data).format == form

    @pytest.mark.parametrize("head", [b"%PDF-1.7", b"<svg/>", b"RIFF\0\0\0\0WAVE", b"II*\0", b"P6 1 1", b"\xff\xd8"])
    def test_others_do_not(self, head: bytes) -> None:
        """As the pipeline has it."""
        with pytest.raises(InvalidValue, match=r"^a\.bin is not an image: pass a JPEG, PNG"):
            check_head(head, "a.bin")
        with pytest.raises(InvalidValue):
            read_header(head + bytes(100))

    def test_files_that_cannot_be_read_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "empty.png").touch()
        with pytest.raises(InvalidValue, match=r"nowhere\.png cannot be read: No such file or directory"):
            check_picture(tmp_path / "nowhere.png")
        with pytest.raises(InvalidValue, match=r"nowhere\.png cannot be read: No such file"):
            read_picture(tmp_path / "nowhere.png")
        with pytest.raises(InvalidValue, match="cannot be read: Is a directory"):
            check_picture(tmp_path)
        with pytest.raises(InvalidValue, match=r"empty\.png is empty"):
            check_picture(tmp_path / "empty.png")

    def test_a_pipe_is_read_at_once(self) -> None:
        """Its bytes come only once."""
        for data in (file_of(), b"text"):
            out, into = os.pipe()
            os.write(into, data)
            os.close(into)
            path = Path(f"/dev/fd/{out}")
            if data == b"text":
                with pytest.raises(InvalidValue, match="is not an image: pass"):
                    check_picture(path)
            else:
                assert check_picture(path) == Image(data)
            os.close(out)
