"""The look of a report: two palettes, and one style sheet that uses them through variables."""

from __future__ import annotations

LIGHT = {
    "paper": "#fbfaf7",
    "ink": "#1c1e20",
    "muted": "#5b6066",
    "rule": "#dedad1",
    "match": "#17663a",
    "heat": "#5d9cce",
    "s0": "#1a5583",
    "s1": "#b4501c",
    "s2": "#17663a",
    "s3": "#7a3b83",
    "s4": "#8a6a00",
    "s5": "#5b6066",
}
DARK = {
    "paper": "#141619",
    "ink": "#e8e6e1",
    "muted": "#a2a7ad",
    "rule": "#31353a",
    "match": "#6fca95",
    "heat": "#2c6ba3",
    "s0": "#82b8e2",
    "s1": "#ee9a68",
    "s2": "#6fca95",
    "s3": "#cf9ad8",
    "s4": "#d9b84a",
    "s5": "#a2a7ad",
}
SERIES = 6  # colours of lines; each has its own dash as well

_SHEET = """
* { box-sizing: border-box; }
html { color-scheme: light dark; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 400 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 54rem; margin: 0 auto; padding: clamp(2rem, 7vw, 5rem) clamp(1.125rem, 4vw, 2rem) 5rem; }
h1, h2, blockquote, .headline dd { font-family: "Iowan Old Style", "Palatino Linotype", Palatino, "Book Antiqua",
  Georgia, "DejaVu Serif", serif; font-weight: 400; }
h1 { font-size: clamp(2rem, 6vw, 3rem); line-height: 1.1; letter-spacing: -.015em; margin: 0; text-wrap: balance; }
h1, p { overflow-wrap: anywhere; }
h2 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 1rem; scroll-margin-top: 1.5rem; }
p { max-width: 42rem; margin: 0 0 1rem; }
header p { margin: 1.25rem 0 0; font-size: 1.125rem; color: var(--muted); }
nav { margin-top: 2rem; font-size: .9rem; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 0; padding: 0; }
a { color: var(--s0); text-underline-offset: .2em; text-decoration-thickness: 1px; }
:focus-visible { outline: 2px solid var(--s0); outline-offset: 3px; }
section { margin-top: clamp(2.75rem, 7vw, 4rem); padding-top: 1.5rem; border-top: 1px solid var(--rule); }
section > :last-child, figure > :last-child { margin-bottom: 0; }
figure { margin: 0 0 2rem; }
.scroll { overflow-x: auto; margin: 0 0 1.5rem; }
.headline { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: 1.5rem 2rem;
  margin: 0 0 1.5rem; }
.headline div { display: flex; flex-direction: column-reverse; justify-content: flex-end; }
.headline dd { margin: 0; font-size: clamp(1.75rem, 5vw, 2rem); line-height: 1.15; white-space: nowrap;
  letter-spacing: -.01em; }
.headline dt { font-size: .875rem; line-height: 1.4; color: var(--muted); margin-top: .35rem; text-wrap: balance; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums lining-nums; }
caption, figcaption { text-align: left; color: var(--muted); font-size: .9rem; padding-bottom: .6rem; }
.data { width: 100%; font-size: .95rem; }
.data th, .data td { padding: .55rem 0 .55rem 1.25rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--rule); font-weight: 400; }
.data th:first-child, .data td:first-child { padding-left: 0; text-align: left; white-space: normal; }
.data .word { text-align: left; }
.data thead th { color: var(--muted); font-size: .85rem; vertical-align: bottom;
  border-bottom-color: var(--muted); white-space: normal; }
.data .strong { font-weight: 650; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr));
  gap: 2rem 2.5rem; align-items: start; }
.grid.narrow { grid-template-columns: repeat(auto-fill, minmax(min(100%, 14rem), 1fr)); }
.grid > * { margin: 0; min-width: 0; }
.grid + * { margin-top: 2rem; }
.code { margin: .35rem 0 1.4rem; padding: .7rem .9rem; white-space: pre-wrap; overflow-wrap: anywhere;
  border-left: 3px solid var(--s0); background: rgb(var(--heat-rgb) / .1);
  font: .85rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
.plot .frame { padding: 1.75rem 1.5rem 3rem 3.25rem; }
.plot .axes { display: block; width: 100%; height: clamp(12rem, 38vw, 20rem); overflow: visible; }
.plot text { fill: var(--muted); font-size: 13px; font-variant-numeric: tabular-nums; }
.plot .name { fill: var(--ink); }
.plot .rule { stroke: var(--rule); stroke-width: 1; }
.plot .tick { fill: var(--muted); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; vector-effect: non-scaling-stroke; }
.line.step { fill-opacity: .12; stroke-width: 1.5; }
.line.raw { stroke-width: 1; opacity: .35; }
.dot { fill: none; stroke-width: 7; stroke-linecap: round; vector-effect: non-scaling-stroke; }
.dot.square { stroke-linecap: square; stroke-width: 8; }
.dot.faint { stroke-width: 4; opacity: .5; }
.ring { fill-opacity: .1; stroke-width: 1; stroke-opacity: .6; vector-effect: non-scaling-stroke; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.5rem;
  margin: 0 0 .75rem; padding: 0; font-size: .9rem; }
.legend svg { width: 28px; height: 10px; margin-right: .5rem; vertical-align: middle; }
.heat table { font-size: .8rem; line-height: 1.2; border-spacing: 2px; border-collapse: separate; }
.heat th { font-weight: 400; padding: .1rem .5rem; text-align: right; white-space: nowrap; }
.heat thead th { padding: .25rem 0; vertical-align: bottom; text-align: center; }
.heat thead span { writing-mode: vertical-rl; transform: rotate(180deg); display: inline-block; text-align: left; }
.heat .axis { color: var(--muted); text-align: left; vertical-align: bottom;
  padding: .25rem .5rem .25rem 0; white-space: nowrap; }
.heat td { min-width: 2.1rem; height: 2.1rem; padding: .1rem; text-align: center; color: var(--ink);
  background: rgb(var(--heat-rgb) / var(--a)); }
.heat .none { color: var(--muted); }
.heat .same { outline: 1.5px solid var(--ink); outline-offset: -1.5px; }
.query { margin: 0 0 2.25rem; }
.query blockquote { margin: 0 0 .75rem; font-size: 1.125rem; line-height: 1.4; }
.query ol { list-style: none; display: grid; grid-template-columns: repeat(var(--n), minmax(0, 1fr));
  gap: clamp(.6rem, 1.6vw, 1rem); margin: 0; padding: 0; }
.query img { display: block; width: 100%; height: auto; border-radius: 3px; background: var(--rule); }
.query .small { image-rendering: pixelated; }
.query .match img { outline: 3px solid var(--match); outline-offset: 2px; }
.query li > div { display: flex; flex-wrap: wrap; gap: 0 .6rem; margin-top: .5rem; font-size: .8rem; line-height: 1.4;
  color: var(--muted); font-variant-numeric: tabular-nums; }
.query b { color: var(--match); font-weight: 600; white-space: nowrap; }
.card > div { display: flex; gap: .6rem; }
.card > div > div { flex: 1 1 0; min-width: 0; font-size: .75rem; line-height: 1.4; color: var(--muted); }
.card img { display: block; width: 100%; height: auto; aspect-ratio: 1; object-fit: contain; border-radius: 3px;
  background: var(--rule); margin-bottom: .3rem; }
.card .small { image-rendering: pixelated; }
.card blockquote { margin: 0 0 .4rem; font-size: 1.05rem; line-height: 1.35; color: var(--ink); }
.card figcaption { padding: .6rem 0 0; font-size: .8rem; line-height: 1.45; overflow-wrap: anywhere; }
.ladder { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 9rem), 1fr)); gap: 1rem 1.25rem;
  padding-bottom: 1.5rem; border-bottom: 1px solid var(--rule); font-size: .8rem; line-height: 1.4; }
.ladder img { display: block; width: 100%; height: auto; border-radius: 3px; background: var(--rule);
  margin-bottom: .3rem; }
.ladder .small { image-rendering: pixelated; }
.ladder span, .ladder h3 { color: var(--muted); overflow-wrap: anywhere; }
.ladder h3 { font-size: .8rem; font-weight: 600; margin: 0 0 .3rem; }
.ladder span + h3 { margin-top: .8rem; }
.ladder ol { list-style: none; margin: 0; padding: 0; }
.ladder li { padding: .2rem 0; border-top: 1px solid var(--rule); overflow-wrap: anywhere; }
.ladder b { color: var(--match); }
@media (max-width: 36rem) {
  .data { font-size: .8rem; }
  .data th, .data td { padding-left: .6rem; }
  .data thead th { font-size: .75rem; }
  .heat table { font-size: .75rem; border-spacing: 1px; }
  .heat td { min-width: 1.8rem; height: 1.9rem; padding: 0; }
  .heat th { padding: .1rem .35rem .1rem 0; }
  .query .match img { outline-width: 2px; outline-offset: 1px; }
  .query li > div { font-size: .75rem; }
}
@media print { section { break-inside: avoid; } nav { display: none; } }
"""


def style_sheet() -> str:
    """The whole style sheet; dark where the reader's system asks for it."""
    return (
        f":root {{{_variables(LIGHT)}}}\n@media (prefers-color-scheme: dark) {{ :root {{{_variables(DARK)}}} }}{_SHEET}"
    )


def rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue in 0..255 of "#rrggbb"."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _variables(palette: dict[str, str]) -> str:
    named = "".join(f"--{name}: {colour}; " for name, colour in palette.items())
    red, green, blue = rgb(palette["heat"])
    return f" {named}--heat-rgb: {red} {green} {blue}; "
