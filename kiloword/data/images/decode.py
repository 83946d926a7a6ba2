"""From an encoded image to uint8 [H, W, 3], by one function for all decoders.

With every decoder, EXIF orientation is applied; transparency is blended with white; the first frame of an animation is
used; 16-bit grey is scaled to 8 bits (by 257), 16-bit colour keeps its high bytes; palettes, grey, CMYK and YCbCr
become RGB; colour profiles and gamma are not applied. The content decides the format, never the extension.
With the decoder "simplejpeg", plain 8-bit JPEG is decoded by it, everything else by Pillow.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError

from kiloword.errors import needs
from kiloword.terminal import shown
from kiloword.types import BadSample

Decoder = Literal["pillow", "simplejpeg"]
Pixels = NDArray[np.uint8]

MAX_PIXELS = 80_000_000  # 240 MB decoded; just below Pillow's own limit
MAX_SCANS = 100  # of a JPEG, each of which goes over the whole image; progressive ones have about 10
# Not EPS and the like, which start other programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "JPEG2000", "PPM")
_HEIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")  # brands
_SCAN, _END = b"\xff\xda", b"\xff\xd9"  # markers of JPEG (ITU-T T.81, B.1)
_PNG = b"\x89PNG\r\n\x1a\n"
_ORIENTATION = 0x0112
_EXIF = {"exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"}  # keys of `Image.info` with an orientation
_LATE = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
# operations of `Image.Transpose` for the EXIF orientations 2 to 8
_TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")


def check_decoder(decoder: Decoder) -> None:
    """Errors: ValueError when the package of the decoder is not installed."""
    if decoder == "simplejpeg" and find_spec(decoder) is None:
        raise ValueError(needs("decoder 'simplejpeg'", decoder, "fast"))


def image_size(image: bytes | Pixels) -> tuple[int, int]:
    """Width and height in pixels, orientation applied, from the header alone. Errors: BadSample."""
    if isinstance(image, np.ndarray):
        return image.shape[1], image.shape[0]
    with _reading():
        opened = _open(image)
        return opened.size if _orientation(opened) < 5 else (opened.height, opened.width)


def decode(image: bytes | Pixels, decoder: Decoder = "pillow", at_least: int | None = None) -> Pixels:
    """One image as uint8 [H, W, 3], RGB.

    Args: image: an array [H, W, 3] is returned unchanged; at_least: a JPEG may be decoded at 1/2, 1/4 or 1/8 (much
    faster) while its shorter side keeps that many pixels; None: full size.
    Errors: BadSample with the reason (not an image, truncated, more than MAX_PIXELS).
    """
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            raise BadSample(f"array is {image.dtype} {list(image.shape)}, expected uint8 [H, W, 3]")
        return image
    with _reading():
        opened, factor = _open(image), 1
        if at_least is not None and opened.format in ("JPEG", "MPO"):
            factor = next((f for f in (8, 4, 2) if min(opened.size) // f >= max(1, at_least)), 1)
        plain = opened.format == "JPEG" and opened.mode in ("RGB", "L") and _orientation(opened) == 1
        if decoder == "simplejpeg" and plain:
            import simplejpeg

            least = {"min_height": opened.height // factor, "min_width": opened.width // factor} if factor > 1 else {}
            with suppress(ValueError):  # libjpeg's warnings are errors here: Pillow gives the pixels, or the reason
                pixels: Pixels = simplejpeg.decode_jpeg(image, "RGB", **least)
                return pixels
        if factor > 1:
            opened.draft("RGB", (opened.width // factor, opened.height // factor))
        return np.asarray(to_rgb(opened))


@contextmanager
def _reading() -> Iterator[None]:
    """Turn all exceptions of decoders on bad bytes into BadSample, and suppress their warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (BadSample, MemoryError):
            raise
        except Image.DecompressionBombError:  # where Pillow only warns, `_open` refuses
            raise BadSample(f"image has more than {MAX_PIXELS:,} pixels") from None
        except UnidentifiedImageError:
            raise BadSample("not an image in a known format") from None
        except Exception as error:  # plugins raise nearly every type on damaged bytes; only they run in here
            what = str(error).strip() or type(error).__name__
            raise BadSample(shown(f"cannot be decoded, damaged or cut: {what}"[:200])) from None


def _open(image: bytes) -> ImageFile.ImageFile:
    """Read the header; check the number of pixels and scans."""
    if not image:
        raise BadSample("the image has zero bytes")
    try:
        opened = Image.open(io.BytesIO(image), formats=_formats(image[4:12]))
    except Exception:
        if not image.startswith(_PNG):
            raise
        opened = Image.open(io.BytesIO(_without_metadata(image)), formats=("PNG",))
    if opened.width * opened.height > MAX_PIXELS:
        raise Image.DecompressionBombError
    if opened.format in ("JPEG", "MPO") and opened.fp is not None:
        start = opened.fp.tell()  # Pillow has read the first scan's header: any thumbnail lies before
        if image.count(_SCAN, start, image.find(_END, start)) >= MAX_SCANS:
            raise BadSample(f"image has more than {MAX_SCANS} scans")
    if opened.format == "PNG" and any(mark in image for mark in _LATE) and not _EXIF & opened.info.keys():
        opened.load()  # metadata of a PNG may stand after its pixels
    return opened


def _without_metadata(png: bytes) -> bytes:
    """A PNG with the chunks alone that its pixels are made of: Pillow refuses one for metadata that it cannot parse."""
    chunks, at = [_PNG], len(_PNG)
    while at + 8 <= len(png):
        end = at + 12 + int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            chunks.append(png[at:end])
        at = end
    return b"".join(chunks)


def _formats(box: bytes) -> tuple[str, ...]:
    """Pillow's formats of an image. Args: box: bytes 4 to 12. Errors: BadSample where a package for it is missing."""
    if not box.startswith(b"ftyp"):
        return _FORMATS
    if box[4:] not in _HEIF:
        return ("AVIF",)
    if reason := missing_package("heic"):
        raise BadSample(reason)
    import pillow_heif

    pillow_heif.register_heif_opener()
    return ("HEIF",)


def missing_package(suffix: str) -> str:
    """What reading images of a suffix ("heic") needs and is not installed; "" where they can be read."""
    heic = suffix in ("heic", "heif") and find_spec("pillow_heif") is None
    return needs("HEIC", "pillow-heif", "heif") if heic else ""


def _orientation(image: Image.Image) -> int:
    """1 to 8; 1 is upright, also where EXIF cannot be parsed. Reads EXIF only if there is any."""
    value = None
    if _EXIF & image.info.keys():
        with suppress(Exception):  # Pillow raises nearly every type on damaged metadata; the pixels may be whole
            value = image.getexif().get(_ORIENTATION)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


@_reading()
def to_rgb(image: Image.Image) -> Image.Image:
    """Decode: upright, transparency over white, 8 bits per channel.

    Errors: BadSample for floating-point images, and for a lazily opened image that cannot be decoded.
    """
    orientation = _orientation(image)
    if image.mode.startswith("I"):  # 16-bit grey, [0, 65535] to [0, 255], rounded
        grey = np.asarray(image).clip(0, 65535).astype(np.uint32)
        image = Image.fromarray(((grey + 128) // 257).astype(np.uint8))
    elif image.mode == "F":
        raise BadSample("floating-point images are not supported")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        image = Image.new("RGB", layer.size, (255, 255, 255))
        image.paste(layer, mask=layer.getchannel("A"))
    elif image.mode != "RGB":
        image = image.convert("RGB")
    else:
        image.load()
    return image if orientation == 1 else image.transpose(Image.Transpose[_TURNS[orientation - 2]])
