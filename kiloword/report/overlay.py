"""As `pictures.overlay`, as an image of Pillow."""

from PIL import Image

from kiloword.report import pictures
from kiloword.report.blocks import Pixels
from kiloword.report.pictures import Floats


def overlay(image: Pixels, looks: Floats, side: int) -> Image.Image:
    """The image [H, W, 3] at `side` pixels with a map [rows, columns] over it."""
    return Image.fromarray(pictures.overlay(image, looks, side))
