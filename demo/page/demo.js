// The page: a text or an image becomes a vector, by the exported graphs in onnxruntime-web, and the images are ranked.
// `data-state` of the document is "loading", "ready" (first images), "done" (a ranking) or "error".

import { Tokenizer } from "./tokenizer.js";

const SHOWN = 12;
const LIKE = "Images like this one"; // heading of a ranking by a stored vector
const at = (id) => document.getElementById(id);
let images; // demo.json, with their vectors and their sprite
let model; // {ort, tokenizer, text, image}; graphs are opened when they are first needed
let asked = 0; // rankings, so that a slow one never replaces a later one

/** A file of the page as "json", "text" or "arrayBuffer". */
async function read(path, kind) {
  let answer;
  try {
    answer = await fetch(path);
  } catch {
    throw new Error(`${path} cannot be read. Is the file server still running?`);
  }
  if (!answer.ok) throw new Error(`${path} is missing (status ${answer.status}). Make the page again, by make demo, and serve its whole folder.`);
  try {
    return await answer[kind]();
  } catch {
    throw new Error(`${path} is damaged. Make the page again, by make demo.`);
  }
}

async function openImages() {
  const [facts, vectors, sheet] = await Promise.all([
    read("demo.json", "json"),
    read("features.bin", "arrayBuffer"),
    read("images.webp", "blob"),
  ]);
  if (vectors.byteLength !== 4 * facts.dim * facts.captions.length) {
    throw new Error(`features.bin has ${vectors.byteLength} bytes, expected ${4 * facts.dim * facts.captions.length}. Make the page again, by make demo.`);
  }
  const sprite = await createImageBitmap(sheet);
  return { ...facts, sprite, vectors: new Float32Array(vectors) }; // browsers run on little-endian machines alone
}

async function openModel() {
  if (typeof WebAssembly !== "object") {
    throw new Error("This browser does not run WebAssembly, which the model needs. Allow it, or take another browser.");
  }
  const [wasmBinary, document, config] = await Promise.all([
    read("ort/ort-wasm-simd-threaded.wasm", "arrayBuffer"),
    read("model/tokenizer.json", "json"),
    read("model/tokenizer_config.json", "json"),
    read("ort/ort.js", "text"), // for its message: the import below has none
  ]);
  const ort = await import("./ort/ort.js");
  Object.assign(ort.env.wasm, { numThreads: 1, wasmBinary }); // several threads would need headers of the server
  const opened = { ort, tokenizer: new Tokenizer(document, config) };
  opened.text = await openGraph(ort, "text");
  return opened;
}

async function openGraph(ort, name) {
  const graph = await read(`model/${name}.onnx`, "arrayBuffer");
  try {
    return await ort.InferenceSession.create(graph, { executionProviders: ["wasm"] });
  } catch (error) {
    throw new Error(`The model does not run in this browser (${String(error.message ?? error).slice(0, 200)}).`);
  }
}

/** The vector of a graph's only input row. */
async function vectorOf(graph, inputs) {
  const { vec } = await graph.run(inputs);
  return vec.data;
}

async function textVector(ids) {
  const { ort, text } = model;
  const row = (values) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
  return vectorOf(text, { input_ids: row(ids), attention_mask: row(ids.map(() => 1)) });
}

async function imageVector(file) {
  const shown = await read("model/preprocessor_config.json", "json");
  model.image ??= openGraph(model.ort, "image");
  const side = shown.crop_size.height;
  const pixels = planes(await squareOf(file, side, shown.do_center_crop), shown.image_mean, shown.image_std);
  return vectorOf(await model.image, { pixel_values: new model.ort.Tensor("float32", pixels, [1, 3, side, side]) });
}

/** RGBA bytes of an image, resized; without its margins if it is cropped. The browser's filter is not kiloword's bicubic one. */
async function squareOf(file, side, cropped) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} cannot be read as an image: choose a PNG, JPEG or WebP file.`);
  }
  const { width, height } = bitmap;
  const [w, h] = cropped ? [Math.min(width, height), Math.min(width, height)] : [width, height];
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white";
  context.fillRect(0, 0, side, side);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, (width - w) / 2, (height - h) / 2, w, h, 0, 0, side, side);
  return context.getImageData(0, 0, side, side).data;
}

/** Normalised [3, H, W] from RGBA bytes [H, W, 4]. */
function planes(bytes, mean, std) {
  const size = bytes.length / 4;
  return Float32Array.from({ length: 3 * size }, (_, n) => {
    const channel = Math.floor(n / size);
    return (bytes[4 * (n % size) + channel] / 255 - mean[channel]) / std[channel];
  });
}

/** Images with scores, best first; equal scores in their order. */
function ranked(vector) {
  const { dim, vectors } = images;
  const scores = images.captions.map((_, image) => {
    let sum = 0;
    for (let n = 0; n < dim; n++) sum += vectors[image * dim + n] * vector[n];
    return { image, score: sum };
  });
  return scores.sort((a, b) => b.score - a.score);
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** An image on a canvas: as a background of an element, its neighbours in the sprite would show at the edges. */
function drawn(image) {
  const { columns, sprite } = images;
  const side = sprite.width / columns;
  const canvas = element("canvas", { width: side, height: side });
  const [x, y] = [(image % columns) * side, Math.floor(image / columns) * side];
  canvas.getContext("2d").drawImage(sprite, x, y, side, side, 0, 0, side, side);
  return canvas;
}

function tile({ image, score }, place) {
  const caption = images.captions[image];
  const button = element("button", { type: "button", class: "image", "aria-label": `Images like this: ${caption}` }, drawn(image));
  button.addEventListener("click", () => rankByImage(image));
  const item = element("li", { "data-image": image }, button);
  if (score !== undefined) {
    const filled = element("span");
    filled.style.width = `${100 * Math.min(Math.max(score, 0), 1)}%`;
    item.dataset.score = score;
    item.append(element("div", {}, element("b", {}, `${place + 1}`), score.toFixed(3)));
    item.append(element("span", { class: "bar", "aria-hidden": "true" }, filled));
  }
  item.append(element("div", {}, caption));
  return item;
}

function show(title, matches) {
  at("results").textContent = title;
  at("images").replaceChildren(...matches.map(tile));
  at("legend").hidden = false;
}

function say(text, state) {
  at("status").textContent = text;
  document.documentElement.dataset.state = state;
  document.body.classList.toggle("error", state === "error");
}

/** Rank by what `vectorIs` computes, and show it, unless another ranking was asked for meanwhile. */
async function rank(title, address, vectorIs, note = "") {
  const mine = ++asked;
  history.replaceState(null, "", address);
  try {
    const start = performance.now();
    const vector = await vectorIs();
    const encoded = performance.now();
    const order = ranked(vector);
    const end = performance.now();
    if (mine !== asked) return;
    show(title, order.slice(0, SHOWN));
    const inModel = title === LIKE ? "" : ` (the model: ${(encoded - start).toFixed(1)} ms)`;
    say(`${order.length} ${images.what} ranked in ${(end - start).toFixed(1)} ms${inModel}.${note}`, "done");
  } catch (error) {
    if (mine === asked) say(error.message, "error");
  }
}

function rankByText(text) {
  at("q").value = text;
  if (!model) return undefined; // its message stands there already
  const { ids, tokens } = model.tokenizer.encode(text);
  const { room } = model.tokenizer;
  if (!tokens) return say("The sentence is empty: type one, such as “${images.examples[0]}”.", "error");
  const note = tokens > room ? ` The sentence has ${tokens} tokens, of which the model reads the first ${room}.` : "";
  const short = text.length > 80 ? `${text.slice(0, 80)}…` : text;
  return rank(`“${short}”`, `?${new URLSearchParams({ q: text })}`, () => textVector(ids), note);
}

async function rankByImage(image) {
  const { dim, vectors } = images;
  await rank(LIKE, `?like=${image}`, () => vectors.subarray(image * dim, (image + 1) * dim));
  at("results").focus({ preventScroll: true }); // the button that had it is gone
  at("results").scrollIntoView({ block: "nearest" });
}

function rankByFile(file) {
  if (file && model) rank(`Images like ${file.name.slice(0, 80)}`, "?", () => imageVector(file));
}

function describe({ model: facts, words = {}, captions, image_size: side, what, about, examples }) {
  at("model").textContent =
    `${facts.method}, size ${facts.size}, ${(facts.parameters / 1e6).toFixed(1)} million parameters` +
    (facts.steps ? `, trained by kiloword for ${facts.steps.toLocaleString("en")} steps on ${facts.data}. ` : ". ") +
    `It sees images of ${side} × ${side} pixels. This page has ${captions.length} ${what}. ${about}`;
  document.querySelectorAll(".what").forEach((place) => place.replaceChildren(what));
  at("examples").replaceChildren(...examples.map((text) => element("button", { type: "button" }, text)));
  at("of-scenes").hidden = !Object.keys(words).length;
  const entries = Object.entries(words).flatMap(([kind, list]) => [element("dt", {}, kind), element("dd", {}, list.join(", "))]);
  at("words").replaceChildren(...entries);
}

function listen() {
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    rankByText(at("q").value);
  });
  at("examples").addEventListener("click", ({ target }) => target.matches("button") && rankByText(target.textContent));
  at("file").addEventListener("change", (event) => rankByFile(event.target.files[0]));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    rankByFile(event.dataTransfer.files[0]);
  });
}

async function start() {
  say("Loading the model …", "loading");
  listen();
  try {
    images = await openImages();
    describe(images);
    show(`Some of the ${images.what}`, images.captions.slice(0, SHOWN).map((_, image) => ({ image })));
    model = await openModel();
  } catch (error) {
    return say(error.message, "error");
  }
  const query = new URLSearchParams(location.search);
  const typed = query.get("q") ?? at("q").value; // typed while the model was loading
  if (typed) return rankByText(typed);
  const like = Number(query.get("like") ?? NaN);
  if (Number.isInteger(like) && like >= 0 && like < images.captions.length) return rankByImage(like);
  return say("Ready: type a sentence, or choose an example.", "ready");
}

start();
