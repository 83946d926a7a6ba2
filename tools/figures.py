"""Draw the figures of README.md and docs/index.md: `make figures` calls this.

    python tools/figures.py [--out docs/assets/figures] [--models build/figures] [--steps N]

Trains two small models on drawn scenes with a fixed seed, within two minutes of processor time each; a finished run is
not repeated, and an interrupted one goes on. What is shown are held-out scenes, the first ones that fit the figure. The
search page needs Chromium; without it, its figure stays as it is. Other machines round differently, so that models, and
with them figures, differ a little.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from kiloword.api import Matcher, load
from kiloword.cli.main import main as kiloword
from kiloword.data.scenes.source import ScenesSource, parse_scenes
from kiloword.data.scenes.world import COLOURS, SHAPES, Scene
from kiloword.files import write_atomic
from kiloword.report.figure import LIGHT
from kiloword.report.pictures import overlay

sys.path.insert(0, str(Path(__file__).resolve().parent))
from browser import Browser, program

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT, MARGIN = 800, 560, 28  # pixels; pages show a figure at half its size
TEXT, SMALL = 21, 19  # pixels: sizes of letters
MEASURED = 200  # held-out scenes behind the numbers in figures
PAPER, INK, MUTED, RULE, BAR = (ImageColor.getrgb(LIGHT[name]) for name in ("paper", "ink", "muted", "rule", "s0"))
QUERY = "a large red circle"  # of the search page
PALETTE = 192  # colours of a file
TOWERS = (  # of both models: those of `tiny`, narrower
    "--size tiny --model.image.width 64 --model.image.depth 2 --model.image.heads 4 --model.image.mlp 128 "
    "--model.text.width 64 --model.text.depth 2 --model.text.heads 4 --model.text.mlp 128 --model.head.dim 64 "
    "--precision fp32 --seed 0"
)
MODELS = {  # the words of `kiloword train`
    # softmax, since captions of one thing match several scenes of a batch; patches are mixed, and one token
    "llip": (
        "clip+contextual --settings.contextual.patch-keys --settings.contextual.k 1 --batch 64 --steps 600 "
        "--data scenes?objects=1,2&levels=2&captions=2&n=8000"
    ),
    # losses weighted as docs/papers/prolip.md says for short runs
    "prolip": (
        "prolip --settings.masked 0.1 --settings.image-in-text 0.01 --settings.hide-words drop --batch 32 --steps 160 "
        "--data scenes?levels=0:1,1:2,2:3,3:3&captions=4&n=4000 --captions all --model.text.context 80"
    ),
}


def scenes_figure() -> Image.Image:
    """Two scenes, each with a chain of captions from general to specific."""
    scenes = parse_scenes("scenes:test?objects=2,3&n=2")
    sheet, y = card("One image has many true captions, from general to specific"), 92
    for row in range(2):
        sheet.paste(drawn(scenes, row, 208), (MARGIN, y))
        below = y
        for caption in scenes.hierarchies(row)[0]:
            below = write_lines(sheet, (MARGIN + 228, below), caption, WIDTH - 2 * MARGIN - 228, TEXT, INK, 4) + 9
        y += 232
    return sheet


def looks_figure(matcher: Matcher) -> Image.Image:
    """Two scenes of three things, and the weights by which a text for each thing mixes the image."""
    scenes = parse_scenes(f"scenes:test?objects=3&n={MEASURED}")
    share = share_in_cell(matcher, scenes)
    sheet, side, y = card("Llip's pooling: a caption chooses where to look"), 176, 80
    for row in [row for row in range(len(scenes)) if distinct(scenes.scene(row))][:2]:
        texts, image = names(scenes.scene(row)), np.asarray(drawn(scenes, row, side))
        looks = maps_of(matcher, scenes, row, texts)
        sheet.paste(Image.fromarray(image), (MARGIN, y))
        for n, (text, look) in enumerate(zip(texts, looks, strict=True), start=1):
            x = MARGIN + n * (side + 13)
            sheet.paste(Image.fromarray(overlay(image, look, side)), (x, y))
            write_lines(sheet, (x, y + side + 4), text, side, SMALL, INK, 1)
        y += side + 38
    note = f"Held-out scenes: {share:.0%} of the weight lies on the named thing's ninth (evenly: 11%)."
    write_lines(sheet, (MARGIN, y + 2), note, WIDTH - 2 * MARGIN, SMALL, MUTED, 2)
    return sheet


def ladder_figure(matcher: Matcher) -> Image.Image:
    """Captions of a scene from general to specific, the uncertainty of each, and the means of many scenes."""
    scenes = parse_scenes(f"scenes:test?objects=2&n={MEASURED}")
    chains = [scenes.hierarchies(row)[0] for row in range(len(scenes))]
    flat = [caption for chain in chains for caption in chain]
    uncertainty = matcher.uncertainty(matcher.encode_text(flat)).view(len(chains), -1)  # [scenes, levels]
    falls = float((uncertainty.diff(dim=1) < 0).all(1).float().mean())
    sheet, full = card("Uncertainty of a ProLIP model falls as captions get specific"), float(uncertainty.max())
    sheet.paste(drawn(scenes, 0, 208), (MARGIN, 92))
    draw, left, y = ImageDraw.Draw(sheet), MARGIN + 228, 92
    room = WIDTH - MARGIN - left
    for caption, value, mean in zip(chains[0], uncertainty[0].tolist(), uncertainty.mean(0).tolist(), strict=True):
        y = write_lines(sheet, (left, y), caption, room, TEXT, INK, 4) + 5
        draw.rectangle((left, y, left + round(room * value / full), y + 18), BAR)
        at = left + round(room * mean / full)
        draw.rectangle((at - 2, y - 4, at + 2, y + 22), INK)
        y += 38
    note = (
        f"Bar: the caption's uncertainty. Mark: the mean of its level over {MEASURED} held-out scenes; it falls at "
        f"every step for {falls:.0%} of them. Specific captions are longer, too, and length explains much of it."
    )
    write_lines(sheet, (MARGIN, HEIGHT - 92), note, WIDTH - 2 * MARGIN, SMALL, MUTED, 3)
    return sheet


def search_figure(model: Path, work: Path) -> Image.Image:
    """The page of `kiloword serve` for a query, over held-out scenes saved as image files."""
    photos, library, scenes = work / "scenes", work / "library", parse_scenes(f"scenes:test?n={MEASURED}")
    photos.mkdir(exist_ok=True)
    for row in range(len(scenes)):
        if not (path := photos / f"{scenes.key(row)}.png").exists():
            write_atomic(path, encoded(drawn(scenes, row, 128)))
    kiloword(["index", str(photos), "--model", str(model), "--out", str(library)])
    words = [sys.executable, "-m", "kiloword", "serve", str(library), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server, Browser() as browser:
        assert server.stdout is not None
        address = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        browser.emulate(3 * WIDTH // 2, 3 * HEIGHT // 2)
        browser.open(f"{address}?q={QUERY.replace(' ', '+')}")
        browser.screenshot(work / "search.png")
        server.terminate()
    shown = Image.open(work / "search.png").convert("RGB").resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
    ImageDraw.Draw(shown).rectangle((0, 0, WIDTH - 1, HEIGHT - 1), outline=RULE)
    return shown


def write_lines(
    sheet: Image.Image, at: tuple[int, int], text: str, room: int, size: int, colour: tuple[int, ...], lines: int
) -> int:
    """Write text in at most `lines` lines of `room` pixels; returns where the next line would start."""
    draw, font, (x, y) = ImageDraw.Draw(sheet), ImageFont.load_default(size), at
    written = [""]
    for word in text.split():
        longer = f"{written[-1]} {word}".strip()
        if written[-1] and font.getlength(longer) > room:
            written.append(word)
        else:
            written[-1] = longer
    for line in written[:lines]:
        draw.text((x, y), line, colour, font)
        y += round(1.35 * size)
    return y


def card(title: str) -> Image.Image:
    """An empty figure: light, so that it is read on light and on dark pages."""
    sheet = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    ImageDraw.Draw(sheet).rectangle((0, 0, WIDTH - 1, HEIGHT - 1), outline=RULE)
    write_lines(sheet, (MARGIN, MARGIN), title, WIDTH - 2 * MARGIN, 26, INK, 1)
    return sheet


def drawn(scenes: ScenesSource, row: int, side: int) -> Image.Image:
    """The scene of a row, `side` pixels high and wide."""
    return Image.fromarray(np.asarray(parse_scenes(scenes.name, side).record(row).image))


def names(scene: Scene) -> list[str]:
    """A text for each thing, as "a red circle"."""
    return [
        f"{'an' if COLOURS[t.colour][0] in 'aeiou' else 'a'} {COLOURS[t.colour]} {SHAPES[t.shape]}"
        for t in scene.things
    ]


def distinct(scene: Scene) -> bool:
    """Whether no two things share a colour or a shape, so that each text means one thing."""
    return all(len({getattr(t, name) for t in scene.things}) == len(scene.things) for name in ("colour", "shape"))


def maps_of(matcher: Matcher, scenes: ScenesSource, row: int, texts: Sequence[str]) -> np.ndarray:
    """Where texts look on the scene of a row: [texts, rows, columns], each sums to 1."""
    explained = matcher.explain(scenes.record(row).image, texts)
    looks = explained.maps[0].view(len(texts), *explained.grid).float().cpu()
    return np.asarray(looks / looks.sum((1, 2), keepdim=True))


def share_in_cell(matcher: Matcher, scenes: ScenesSource) -> float:
    """Share of the weights of a thing's text on its cell of the 3 x 3, mean over things of distinct scenes."""
    shares = []
    for row in range(len(scenes)):
        scene = scenes.scene(row)
        if distinct(scene):
            for thing, look in zip(scene.things, maps_of(matcher, scenes, row, names(scene)), strict=True):
                cells = np.kron(look, np.ones((3, 3)) / 9).reshape(3, len(look), 3, len(look)).sum((1, 3))
                shares.append(cells[thing.row, thing.column])
    return float(np.mean(shares))


def encoded(image: Image.Image) -> bytes:
    """A PNG of few colours, which figures have anyway."""
    file = io.BytesIO()
    image.quantize(PALETTE, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def trained(models: Path, steps: int | None) -> dict[str, Path]:
    """The folder of each model, trained where it is not yet. Args: steps: for a trial, of each model."""
    for name, words in MODELS.items():
        words = words if steps is None else re.sub(r"--steps \d+", f"--steps {steps}", words)
        kiloword(["train", *f"{words} {TOWERS}".split(), "--out", str(models / name)])
    return {name: models / name / "model" for name in MODELS}


def main(words: Sequence[str] | None = None) -> int:
    """Draw all figures."""
    parser = argparse.ArgumentParser(description="Draw the figures of README.md and docs/index.md.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "assets" / "figures", help="folder of the figures")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "figures", help="folder of the trained models")
    parser.add_argument("--steps", type=int, help="steps of each model, for a trial")
    args = parser.parse_args(words)
    args.out.mkdir(parents=True, exist_ok=True)
    folders = trained(args.models, args.steps)
    figures: dict[str, Callable[[], Image.Image]] = {
        "scenes": scenes_figure,
        "looks": lambda: looks_figure(load(folders["llip"])),
        "ladder": lambda: ladder_figure(load(folders["prolip"])),
        "search": lambda: search_figure(folders["llip"], args.models),
    }
    if program() is None:
        print("No Chromium on the path: the figure of the search page is not drawn.", file=sys.stderr)
        del figures["search"]
    for name, figure in figures.items():
        data = encoded(figure())
        write_atomic(args.out / f"{name}.png", data)
        print(f"{args.out / f'{name}.png'}: {len(data) / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
