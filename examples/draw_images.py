"""Draw six images to try a model of images and texts with: `python examples/draw_images.py [FOLDER]`."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

SIZE = (400, 300)
"""Of the files, in pixels."""

_SMOOTH = 2
"""Drawn so many times as large, and made smaller."""

Draw = Callable[[ImageDraw.ImageDraw], None]


def red_circle(draw: ImageDraw.ImageDraw) -> None:
    draw.ellipse((240, 140, 560, 460), fill=(214, 38, 32), outline=(120, 16, 14), width=8)


def blue_square(draw: ImageDraw.ImageDraw) -> None:
    draw.rectangle((250, 150, 550, 450), fill=(28, 84, 205), outline=(12, 40, 110), width=8)


def green_triangle(draw: ImageDraw.ImageDraw) -> None:
    draw.polygon([(400, 110), (600, 470), (200, 470)], fill=(30, 150, 62))


def striped_ball(draw: ImageDraw.ImageDraw) -> None:
    """Six wedges around its middle."""
    colours = [(225, 50, 45), (250, 250, 245), (40, 95, 210)]
    for number in range(6):
        draw.pieslice((230, 130, 570, 470), number * 60, number * 60 + 60, fill=colours[number % 3])
    draw.ellipse((375, 275, 425, 325), fill=(245, 205, 60))


def house(draw: ImageDraw.ImageDraw) -> None:
    draw.rectangle((240, 280, 560, 500), fill=(226, 196, 150))
    draw.polygon([(210, 285), (400, 130), (590, 285)], fill=(165, 58, 42))
    draw.rectangle((365, 390, 435, 500), fill=(96, 62, 40))
    for left in (270, 470):
        draw.rectangle((left, 320, left + 60, 370), fill=(150, 205, 235), outline=(80, 80, 90), width=4)


def fish(draw: ImageDraw.ImageDraw) -> None:
    """Three of them: a small shoal."""
    for left, top in ((120, 160), (380, 240), (190, 390)):
        draw.ellipse((left, top, left + 220, top + 100), fill=(240, 130, 35))
        draw.polygon([(left + 200, top + 50), (left + 275, top + 5), (left + 275, top + 95)], fill=(225, 110, 25))
        draw.ellipse((left + 35, top + 30, left + 55, top + 50), fill=(20, 20, 20))


IMAGES: dict[str, tuple[Draw, tuple[int, int, int]]] = {
    "red_circle.jpg": (red_circle, (238, 236, 230)),
    "blue_square.jpg": (blue_square, (238, 236, 230)),
    "green_triangle.png": (green_triangle, (250, 250, 248)),
    "striped_ball.jpg": (striped_ball, (222, 205, 160)),
    "house.jpg": (house, (168, 206, 238)),
    "fish.png": (fish, (40, 120, 170)),
}
"""File name to what is drawn, on which ground."""


def drawn(draw: Draw, ground: tuple[int, int, int], seed: int) -> Image.Image:
    """On a ground that gets darker towards its foot; with some grain, as photographs have it."""
    width, height = SIZE[0] * _SMOOTH, SIZE[1] * _SMOOTH
    image = Image.new("RGB", (width, height))
    brush = ImageDraw.Draw(image)
    for row in range(height):
        light = 1 - 0.25 * row / height
        brush.line((0, row, width, row), fill=(int(ground[0] * light), int(ground[1] * light), int(ground[2] * light)))
    draw(brush)
    for x, y, radius in _specks(random.Random(seed), width, height):
        tone = int(90 + 120 * abs(math.sin(x + y)))
        brush.ellipse((x, y, x + radius, y + radius), fill=(tone, tone, tone))
    return image.filter(ImageFilter.GaussianBlur(0.8)).resize(SIZE, Image.Resampling.LANCZOS)


def _specks(dice: random.Random, width: int, height: int) -> Iterator[tuple[int, int, int]]:
    return ((dice.randrange(width), dice.randrange(height), dice.randrange(1, 4)) for _ in range(700))


def draw_all(folder: Path) -> list[Path]:
    """Write them all; answers the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for seed, (name, (draw, ground)) in enumerate(IMAGES.items()):
        paths.append(path := folder / name)
        drawn(draw, ground, seed).save(path, quality=88)
    return paths


def main() -> None:
    for path in draw_all(Path(sys.argv[1] if len(sys.argv) > 1 else "images")):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
