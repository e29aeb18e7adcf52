"""Images for tests, drawn here: every supported kind, and invalid files."""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from shoal.specs import ImageSpec

CLIP = ImageSpec(
    size=(224, 224),
    dimension=8,
    edge=224,
    crop=(224, 224),
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)
SIGLIP = ImageSpec(size=(224, 224), dimension=8, resize="squash", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
PNG = b"\x89PNG\r\n\x1a\n"


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB image with a color gradient, sharp edges and noise; it is asymmetric, so that rotations show."""
    rng = np.random.default_rng([width, height, seed])
    y, x = np.ogrid[0:height, 0:width]
    slope = np.empty((height, width, 3), np.uint8)
    slope[..., 0], slope[..., 1] = x * 255 // max(1, width - 1), y * 255 // max(1, height - 1)
    slope[..., 2] = x.astype(np.uint8) + (2 * y).astype(np.uint8)  # modulo 256
    image = Image.fromarray(slope)
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        left, top = int(rng.integers(0, width)), int(rng.integers(0, height))
        right, bottom = left + int(rng.integers(0, width)), top + int(rng.integers(0, height))
        colour = tuple(int(each) for each in rng.integers(0, 256, 3))
        (pen.ellipse if rng.random() < 0.5 else pen.rectangle)((left, top, right, bottom), fill=colour)
    noise = rng.integers(0, 256, (max(1, height // 4), max(1, width // 4), 3), dtype=np.uint8)
    image.paste(Image.fromarray(noise), (0, 0))
    return image


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return the bytes of a file of this kind."""
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def with_alpha(image: Image.Image) -> Image.Image:
    """An RGBA image from transparent on the left, with colors, to opaque on the right."""
    alpha = np.linspace(0, 255, image.width).astype(np.uint8)
    result = image.convert("RGBA")
    result.putalpha(Image.fromarray(np.tile(alpha, (image.height, 1))))
    return result


def turned(orientation: int, kind: str = "JPEG", size: tuple[int, int] = (300, 200)) -> bytes:
    """An image with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(drawn(*size), kind, exif=exif)


def deep() -> Image.Image:
    """A 16-bit gray image over the whole range."""
    y, x = np.mgrid[0:240, 0:320]
    return Image.fromarray(((x * 65535 // 319 + y * 100) % 65536).astype(np.uint16))


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return one PNG chunk."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, *chunks: bytes, colour: int = 2, depth: int = 8) -> bytes:
    """A PNG that declares this size, whatever its chunks hold."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"".join([PNG, header, *chunks, chunk(b"IEND", b"")])


def animation(kind: str, **options: Any) -> bytes:
    """Three different frames."""
    frames = [drawn(240, 180, seed) for seed in range(3)]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options)


@cache
def image_files() -> dict[str, bytes]:
    """One image of each kind, by name, whose pixels transformers decodes correctly."""
    plain = drawn(320, 240)
    palette = plain.quantize(64)
    black_and_white = plain.convert("1")
    images = {
        "wide": saved(drawn(900, 90), "PNG"),
        "tall": saved(drawn(90, 900), "PNG"),
        "very wide": saved(drawn(6000, 7), "PNG"),
        "very tall": saved(drawn(7, 6000), "PNG"),
        "one pixel": saved(drawn(1, 1), "PNG"),
        "tiny": saved(drawn(3, 2), "PNG"),
        "a line": saved(drawn(1, 40), "PNG"),
        "square": saved(drawn(224, 224), "PNG"),
        "nearly square": saved(drawn(225, 223), "PNG"),
        "odd": saved(drawn(301, 227), "PNG"),
        "below the edge": saved(drawn(150, 100), "PNG"),
        "large": saved(drawn(3000, 2000), "JPEG"),
        "grey": saved(plain.convert("L"), "PNG"),
        "grey JPEG": saved(plain.convert("L"), "JPEG"),
        "grey and alpha": saved(with_alpha(plain).convert("LA"), "PNG"),
        "alpha": saved(with_alpha(plain), "PNG"),
        "alpha WebP": saved(with_alpha(plain), "WEBP", lossless=True),
        "a transparent colour": saved(plain, "PNG", transparency=plain.getpixel((200, 200))),
        "a transparent grey": saved(plain.convert("L"), "PNG", transparency=90),
        "palette": saved(palette, "PNG"),
        "palette with a transparent colour": saved(palette, "PNG", transparency=5),
        "palette with alpha": saved(palette, "PNG", transparency=bytes(range(0, 256, 4))),
        "palette BMP": saved(palette, "BMP"),
        "1 bit": saved(black_and_white, "PNG"),
        "1 bit BMP": saved(black_and_white, "BMP"),
        "BMP": saved(plain, "BMP"),
        "CMYK": saved(plain.convert("CMYK"), "JPEG"),
        "progressive": saved(plain, "JPEG", progressive=True),
        "JPEG without subsampling": saved(plain, "JPEG", subsampling=0, quality=95),
        "WebP": saved(plain, "WEBP"),
        "lossless WebP": saved(plain, "WEBP", lossless=True),
        "GIF": saved(palette, "GIF"),
        "transparent GIF": saved(palette, "GIF", transparency=3),
        "animated GIF": animation("GIF"),
        "animated WebP": animation("WEBP", lossless=True),
        "animated PNG": animation("PNG"),
        "PNG with EXIF": turned(6, "PNG"),
        "WebP with EXIF": turned(8, "WEBP"),
    }
    return images | {f"EXIF {each}": turned(each) for each in range(1, 9)}


@cache
def broken() -> dict[str, bytes]:
    """Files that are not images, or of an unsupported kind."""
    plain = drawn(320, 240)
    whole = {kind: saved(plain, kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP")}
    cut = {f"half a {kind}": data[: len(data) // 2] for kind, data in whole.items()}
    starts = {f"the start of a {kind}": data[:16] for kind, data in whole.items()}
    huge_chunk = PNG + struct.pack(">I", 0xFFFFFFFF) + b"IHDR" + bytes(40)
    return (
        cut
        | starts
        | {
            "text": b"hello",
            "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
            "SVG with a declaration": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>',
            "TIFF": saved(plain, "TIFF"),
            "ICO": saved(plain, "ICO"),
            "PPM": saved(plain, "PPM"),
            "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
            "a PDF before a JPEG": b"%PDF-1.4\n" + whole["JPEG"],
            "a script that begins as a GIF": b"GIF89a=1;/*" + b"<script>alert(1)</script>*/",
            "a JPEG behind the magic of a PNG": PNG + whole["JPEG"],
            "a PNG behind the magic of a JPEG": b"\xff\xd8\xff" + whole["PNG"],
            "a page behind BM": b"BM<html><body onload='x()'></body></html>" + bytes(60),
            "no pixels": png_of(0, 10, chunk(b"IDAT", zlib.compress(b""))),
            "a PNG of one huge chunk": huge_chunk,
            "a PNG without pixels": png_of(10, 10),
            "a PNG with broken deflate": png_of(10, 10, chunk(b"IDAT", b"\x78\x9c" + b"\xff" * 50)),
            "a GIF without a frame": whole["GIF"][:13] + b";",
            "a WebP without an image": b"RIFF\x10\x00\x00\x00WEBPJUNK\x04\x00\x00\x00abcd",
            "a compressed BMP": whole["BMP"][:30] + struct.pack("<I", 1) + whole["BMP"][34:],
        }
    )


def many_scans(number: int) -> bytes:
    """A progressive JPEG that repeats its last scan."""
    data = saved(drawn(64, 64), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * number + data[-2:]


def bombs() -> dict[str, bytes]:
    """Small files that need much memory or time; all are refused."""
    zeros = zlib.compress(bytes(60_000_000), 9)
    webp = bytearray(saved(with_alpha(drawn(40, 30)), "WEBP", lossless=False, exif=b"Exif\x00\x00"))
    assert webp[12:16] == b"VP8X"
    webp[24:30] = b"\xff\x3f\x00\xff\x3f\x00"
    bmp = bytearray(saved(drawn(40, 30), "BMP"))
    bmp[18:26] = struct.pack("<ii", 40_000, -40_000)
    gif = bytearray(saved(drawn(40, 30).quantize(4), "GIF"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    jpeg = bytearray(saved(drawn(40, 30), "JPEG"))
    frame = jpeg.index(b"\xff\xc0") + 5
    jpeg[frame : frame + 4] = struct.pack(">HH", 40_000, 40_000)
    return {
        "PNG of 40k x 40k": png_of(40_000, 40_000, chunk(b"IDAT", zeros)),
        "PNG of 2^31 pixels a side": png_of(2**31 - 1, 2**31 - 1, chunk(b"IDAT", zeros)),
        "PNG, one pixel too many": png_of(8_001, 5_000, chunk(b"IDAT", zeros)),
        "PNG of one long line": png_of(40_000_000, 1, chunk(b"IDAT", zeros)),
        "PNG whose pixels are text": png_of(
            20, 20, *[chunk(b"zTXt", b"a\x00\x00" + zeros)] * 9, chunk(b"iCCP", b"b\x00\x00" + zeros)
        ),
        "WebP": bytes(webp),
        "BMP": bytes(bmp),
        "GIF": bytes(gif),
        "JPEG": bytes(jpeg),
        "JPEG of many scans": many_scans(20_000),
    }
