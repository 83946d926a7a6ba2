"""From a model folder to a `Matcher`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kiloword.api.matcher import Matcher
from kiloword.distributed.device import choose
from kiloword.interop.names import local_folder
from kiloword.methods.registry import parts_of
from kiloword.model.model import Model, resize, resize_text
from kiloword.model.prefix import keep_prefix_
from kiloword.models.adapters import FILE
from kiloword.models.card import CARD
from kiloword.models.model_folder import WEIGHTS, model_files, open_model, read_model_file
from kiloword.models.trust import Trust

LONGEST_CARD = 1 << 20  # bytes


def load(
    path: str | Path,
    device: str = "cpu",
    dtype: str = "fp32",
    size: int | None = None,
    context: int | None = None,
    method: str | None = None,
    trust_code: bool = False,
    precision: str = "fp32",
    base: str | Path | None = None,
    dim: int | None = None,
) -> Matcher:
    """Load a model folder (`OUT/model` of a run), or another library's model; code of a folder runs only if allowed.

    Of other libraries: "open_clip:NAME[@TAG]:FILE", "hf:FOLDER", "hf-hub:ORG/NAME" (see `interop.names`).

    Args: device: "cpu", "cuda", "cuda:N", "mps", or "auto", the first that is there of CUDA, MPS and CPU; dtype:
    "fp32", "bf16" or "fp64"; size: another image size in pixels, with interpolated positions; context: another maximum
    number of tokens in a text: the first 20 and last 2 positions are kept, the others interpolated (arXiv:2503.08048);
    method: of the model, may be your own "module:preset"; trust_code: import the module that the folder names;
    precision: of the encoders, "fp32" (dtype), "bf16" (autocast; features and scores are fp32) or "auto" (bf16 on CUDA
    where the model is larger than size tiny); base: of a folder of adapters alone (OUT/adapter of a run with LoRA), the
    model folder that its --init named; dim: keep the first numbers of the embedding, normalised again, of a model whose
    score is the cosine of one vector each; what is saved then is a model of that size, without +matryoshka.
    Raises: ValueError when a file is missing, damaged or does not fit the others, size is below the patch,
    context is too short for the kept positions, or dim is not a size that the embedding has.
    """
    device, path = choose(device, mps=True), local_folder(path)
    trust = Trust(method=method, trust_code=trust_code)
    model, tokenizer, slots = open_model(path, device, dtype, trust, precision, base)
    folder = model_files(path)[0].parent
    file = read_model_file(folder, WEIGHTS if base is None else FILE)
    model = _resized(model, size, context)
    if dim is not None:
        keep_prefix_(model, dim)
        settings = {name: value for name, value in file.settings.items() if name != "matryoshka"}
        file = replace(file, method="+".join(p for p in parts_of(file.method) if p != "matryoshka"), settings=settings)
    card = ""
    with suppress(OSError), (folder / CARD).open("rb") as opened:
        card = opened.read(LONGEST_CARD).decode(errors="replace")
    return Matcher(model, tokenizer, slots, file, card)


def _resized(model: Model, size: int | None, context: int | None) -> Model:
    config, state = model.config, model.state_dict()
    if size not in (None, config.image.size):
        config, state = resize(config, state, size)
    if context not in (None, config.text.context):
        config, state = resize_text(config, state, context)
    if config == model.config:
        return model
    resized = Model(config, model.head, dict(model.more.items()))
    resized.load_state_dict(state)
    resized.precision = model.precision
    parameter = next(model.parameters())
    return resized.to(parameter.device, parameter.dtype).eval()
