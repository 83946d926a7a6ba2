"""Weights from open_clip: the CLIP families, with and without quick GELU, ResNets too, SigLIP and CoCa."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kiloword.config.recipes import ModelConfig
from kiloword.interop import folder
from kiloword.interop.folder import Imported, ImportReport
from kiloword.interop.open_clip_config import raw_config, translate
from kiloword.methods.registry import preset
from kiloword.model.heads import Head, Scale, Single
from kiloword.model.model import Model
from kiloword.models.model_folder import check_fit
from kiloword.terminal import say

MAX_SCALE = 100.0  # of CLIP
TOWERS = ("visual", "text", "transformer", "text_projection", "text_decoder", "vision_model", "text_model")
WRAPPERS = re.compile(r"^((module|_orig_mod)\.)+|(?<=\.)_orig_mod\.")  # in names: of DDP and torch.compile
INERT = (  # in pickles of training checkpoints, beside the weights
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    *("numpy.dtype", "numpy.ndarray", "_codecs.encode", "argparse.Namespace", "pathlib.PosixPath"),
)
CODE = re.compile(r"GLOBAL (\S+)")  # in torch's refusal of a pickle: what it would import


class _Inert:
    """Stands for an object in a checkpoint that is not read: numbers of numpy, settings, paths."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


def read(path: str | Path) -> dict[str, Tensor]:
    """A state dict from a .safetensors file, or from a .pt, .pth or .bin file: the tensors of a model, or of a
    checkpoint of a training that holds one model. No code of a file runs.

    Raises: ValueError when the file is missing, is something else, holds several models, or would run code.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no file of weights at {path}: check the path.")
    try:
        if path.suffix == ".safetensors":
            return _unwrapped(path, load_file(path))
        inert: list[Any] = [(_Inert, name) for name in INERT]
        with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals(inert):  # of old protocols
            raw = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler can raise almost anything for damaged files
        raise ValueError(f"{path} cannot be read as plain tensors ({_reason(error)}.") from error
    if state := _state(raw):
        return _unwrapped(path, state)
    inner = {key: state for key, value in raw.items() if (state := _state(value))} if isinstance(raw, dict) else {}
    if len(inner) != 1:
        found = f"several state dicts ({', '.join(map(str, inner))}), of which one" if inner else "no state dict, which"
        raise ValueError(f"{path} holds {found} was expected: save the tensors of the model alone.")
    return _unwrapped(path, *inner.values())


def _state(value: Any) -> dict[str, Tensor]:
    """A state dict without counters, such as an epoch, of which tensors are the most; {} for anything else."""
    state = {k: x for k, x in value.items() if not isinstance(x, int | float | None)} if isinstance(value, dict) else {}
    return state if state and 2 * len(state) > len(value) and all(map(_plain, state.values())) else {}


def _unwrapped(path: Path, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names that the model gives them, without those of DDP, torch.compile and Lightning."""
    plain = {WRAPPERS.sub("", str(name)): value for name, value in state.items()}
    if len(plain) < len(state):
        raise ValueError(f"{path} holds weights with and without the prefixes module. and _orig_mod.: expected one.")
    shared = "model." if all(name.startswith("model.") for name in plain) else ""  # Lightning's
    return {name.removeprefix(shared): value for name, value in plain.items()}


def _reason(error: Exception) -> str:
    """Why a file of weights cannot be read, with a closing bracket, and what to do."""
    give = "give a .safetensors file or a .pt of a state dict"
    if "TorchScript" in str(error):
        return "it is a TorchScript archive, whose code is never run): save its state_dict() as a .safetensors file"
    if isinstance(error, SafetensorError | RuntimeError | OSError):
        first = str(error).splitlines()[0][:200].rstrip(".") if str(error) else type(error).__name__
        return f"{first}): {'' if isinstance(error, OSError) else 'copy it again, or '}{give}"
    asked = CODE.search(str(error))  # torch's own message advises to run the file's code
    if asked:
        return f"it asks for {asked[1][:100]}, and code of a file is never run): {give}"
    return f"it is damaged, or holds more than tensors): {give}"


def _plain(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.is_quantized or value.is_complex())
    )


def import_state(name: str, state: Mapping[str, Tensor]) -> Imported:
    """Translate a state dict of open_clip's model `name`.

    The scale and bias are unchanged. A model with a bias becomes a siglip, one with a text decoder a coca, any other a
    clip. Raises: ValueError for an unknown model, an unsupported architecture, and as `check_translated`.
    """
    raw = raw_config(name)
    depth = raw.get("multimodal_cfg", {}).get("layers", 12)
    return import_as(translate(name, raw), f"open_clip's {name}", state, depth)


def import_as(config: ModelConfig, origin: str, state: Mapping[str, Tensor], decoder_depth: int = 0) -> Imported:
    """As `import_state`, for a configuration.

    Args: origin: of the configuration, for messages; decoder_depth: blocks of a coca's text decoder.
    """
    coca = config.head.image_pool == "attentional"
    siglip = config.head.image_pool == "map" or ("logit_bias" in state and not coca)
    translated, unused = placed(state, coca)
    settings = {"decoder_depth": decoder_depth} if coca and decoder_depth != config.text.depth else {}
    with torch.device("meta"):
        head = Head(Single(config), scale=Scale(bias=0.0 if siglip else None))
        towers = preset("coca", settings).decoders if coca else {}
        expected = Model(config, head, {tower: make(config) for tower, make in towers.items()}).state_dict()
    unused += [translated.pop(ours)[0] for ours in list(translated) if ours not in expected]
    check_translated(origin, expected, translated, unused)
    ours_state = {n: value for n, (_, value) in translated.items()}
    if not siglip and "head.log_scale" in ours_state:
        ours_state["head.log_limit"] = ours_state["head.log_scale"].clamp(min=math.log(MAX_SCALE))
    report = ImportReport({n: theirs for n, (theirs, _) in sorted(translated.items())}, [], sorted(unused))
    return Imported(config, "coca" if coca else "siglip" if siglip else "clip", ours_state, report, settings)


def check_translated(
    origin: str,
    expected: Mapping[str, Tensor],
    translated: Mapping[str, tuple[str, Tensor]],
    unused: Iterable[str] = (),
) -> None:
    """Compare the tensors that a model needs with those of a file.

    Args: origin: of `expected`, for messages; translated: name in kiloword -> name in the file and value; unused: names
    in the file without a name in kiloword.
    Raises: ValueError naming tensors of another shape or type, missing ones, and unused ones of the towers, which
    compute something that kiloword's towers do not.
    """
    if not translated:
        raise ValueError(f"none of these weights is one of {origin}")
    for theirs, value in translated.values():
        if not value.is_floating_point():
            raise ValueError(f"{theirs} holds {value.dtype}: expected floating-point weights")
    actual = {ours: value.shape for ours, (_, value) in translated.items()}
    foreign = {name: () for name in unused if name.partition(".")[0] in TOWERS}
    check_fit({name: x.shape for name, x in expected.items()}, {**actual, **foreign}, "these weights", origin)


def placed(state: Mapping[str, Tensor], coca: bool | None = None) -> tuple[dict[str, tuple[str, Tensor]], list[str]]:
    """Name in kiloword -> name in open_clip and reshaped value; and the unused names of open_clip.

    Args: coca: whether they are of a CoCa; None: where they have a text decoder.

    Raises: ValueError for a tensor that cannot be reshaped.
    """
    rest, unused = dict(state), []
    coca = any(name.startswith("text_decoder.") for name in state) if coca is None else coca
    theirs = "text_decoder"
    try:
        translated = _coca_parts(rest) if coca else _attention_pool(rest)
        for theirs, value in rest.items():
            ours, reshaped = place(theirs, value, coca)
            if ours is None:
                unused.append(theirs)
            else:
                translated[ours] = (theirs, reshaped)
    except (IndexError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ValueError(f"{theirs[:200]} has a shape that no model of open_clip's has ({reason}).") from error
    return translated, unused


def place(theirs: str, value: Tensor, coca: bool = False) -> tuple[str | None, Tensor]:
    """Name in kiloword of a parameter of open_clip (None: unused), and its value or gradient in kiloword's shape."""
    plain = theirs.removeprefix("text.")  # open_clip has two layouts of its text tower
    resnet = plain.startswith(("visual.bn", "visual.layer", "visual.attnpool.")) or (
        plain.startswith("visual.conv") and (plain[11] != "1" or value.shape[-1] == 3)  # no patch has 3 pixels
    )
    if resnet:
        return _name(plain, _RESNET), value
    return _name(plain, _COCA if coca else _CLIP), _reshape(plain, value)


_BLOCK = {
    "ln_1_kv": "norm_memory",
    "ln_1": "norm1",
    "ln_2": "norm2",
    "attn.in_proj_": "attention.qkv.",
    "attn.out_proj": "attention.out",
    "mlp.c_fc": "mlp.fc",
    "mlp.c_proj": "mlp.proj",
    # timm's names
    "attn.qkv": "attention.qkv",
    "attn.proj": "attention.out",
    "mlp.fc1": "mlp.fc",
    "mlp.fc2": "mlp.proj",
}
_CLIP = {  # the first beginning that fits is replaced; {}: the number of a block, whose parts are in _BLOCK
    "logit_scale": "head.log_scale",
    "logit_bias": "head.bias",
    "visual.class_embedding": "image_tower.class_token",
    "visual.positional_embedding": "image_tower.positions",
    "visual.conv1.weight": "image_tower.patches.weight",
    "visual.proj": "head.pooling.image_projection.weight",
    "visual.ln_pre.": "image_tower.pre_norm.",
    "visual.ln_post.": "image_tower.norm.",
    "visual.transformer.resblocks.": "image_tower.blocks.{}.",
    "visual.trunk.pos_embed": "image_tower.positions",
    "visual.trunk.norm.": "image_tower.norm.",
    "visual.trunk.patch_embed.proj.": "image_tower.patches.",
    "visual.trunk.blocks.": "image_tower.blocks.{}.",
    "visual.trunk.attn_pool.latent": "head.pooling.image_pool.map.probe",
    "visual.trunk.attn_pool.mlp.fc1.": "head.pooling.image_pool.map.mlp.fc.",
    "visual.trunk.attn_pool.mlp.fc2.": "head.pooling.image_pool.map.mlp.proj.",
    "visual.trunk.attn_pool.proj.": "head.pooling.image_pool.map.out.",
    "visual.trunk.attn_pool.": "head.pooling.image_pool.map.",
    "token_embedding.weight": "text_tower.tokens",
    "positional_embedding": "text_tower.positions",
    "transformer.resblocks.": "text_tower.blocks.{}.",
    "ln_final.": "text_tower.norm.",
    "text_projection.": "head.pooling.text_projection.",
    "text_projection": "head.pooling.text_projection.weight",
}
_RESNET = {  # whose first convolution and stages have names of their own
    "visual.attnpool.positional_embedding": "head.pooling.image_pool.attention.positions",
    "visual.attnpool.c_proj.": "head.pooling.image_projection.",
    **{f"visual.conv{n + 1}.": f"image_tower.stem.{n}." for n in range(3)},
    **{f"visual.bn{n + 1}.": f"image_tower.stem_norms.{n}." for n in range(3)},
    **{f"visual.layer{n + 1}.": f"image_tower.stages.{n}." for n in range(4)},
} | {theirs: ours for theirs, ours in _CLIP.items() if not theirs.startswith("visual.")}
_POOL, _DECODER = "head.pooling.image_pool.attentional.", "more.text_decoder."
_COCA = _CLIP | {
    "visual.attn_pool.query": _POOL + "probes",
    "visual.attn_pool.ln_q.": _POOL + "norm_query.",
    "visual.attn_pool.ln_k.": "image_tower.norm.",
    "visual.attn_pool.attn.out_proj.": _POOL + "attention.out.",
    "visual.ln_post.": _POOL + "norm.",
    "text_decoder.ln_final.": _DECODER + "norm.",
    "text_decoder.text_projection": _DECODER + "output",
    "text_decoder.resblocks.": _DECODER + "layers.{}.own.",
    "text_decoder.cross_attn.": _DECODER + "layers.{}.cross.",
}


def _name(theirs: str, names: Mapping[str, str]) -> str | None:
    """Name in kiloword: "transformer.resblocks.3.attn.in_proj_bias" -> "text_tower.blocks.3.attention.qkv.bias"."""
    beginning = next((beginning for beginning in names if theirs.startswith(beginning)), None)
    if beginning is None:
        return None
    ours, rest = names[beginning], theirs.removeprefix(beginning)
    if "{}" in ours:
        number, _, rest = rest.partition(".")
        part = next((part for part in _BLOCK if rest.startswith(part)), "")
        rest = _BLOCK.get(part, "") + rest.removeprefix(part)
        ours = ours.format(number)
    return ours + rest


def _reshape(theirs: str, value: Tensor) -> Tensor:
    if theirs in ("logit_scale", "logit_bias"):
        return value.reshape(1)
    if theirs in ("visual.proj", "text_projection", "text_decoder.text_projection"):  # they multiply from the left
        return value.T.contiguous() if value.ndim == 2 else value
    if theirs in ("visual.conv1.weight", "visual.trunk.patch_embed.proj.weight"):
        return value.flatten(1)
    if theirs == "visual.trunk.pos_embed":
        return value[0]
    return value.flatten() if theirs == "visual.trunk.attn_pool.latent" else value


def _coca_parts(rest: dict[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """Remove from `rest` the weights that CoCa composes of several, or splits, and translate them as `placed`."""
    attentions = {"visual.attn_pool.attn.": _POOL + "attention."}
    for n in {name.split(".")[2] for name in rest if name.startswith("text_decoder.cross_attn.")}:
        attentions[f"text_decoder.cross_attn.{n}.attn."] = f"{_DECODER}layers.{n}.cross.attention."
    translated: dict[str, tuple[str, Tensor]] = {}
    for theirs, ours in attentions.items():
        translated |= _attention(theirs, ours, rest)
    tokens, cls = "text.token_embedding.weight", "text.cls_emb"
    if tokens in rest and cls in rest:
        table, row = rest.pop(tokens), rest.pop(cls)
        translated["text_tower.tokens"] = (tokens, torch.cat([table, table.mean(0, True), row[None]]))  # mask, class
    return translated


def _attention_pool(rest: dict[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """Remove what batch norms count, and keys and values of a ResNet's pooling; translate the latter as `placed`."""
    for name in [name for name in rest if name.endswith(".num_batches_tracked")]:
        del rest[name]
    theirs, ours = "visual.attnpool.", "head.pooling.image_pool.attention."
    translated: dict[str, tuple[str, Tensor]] = {}
    for kind in ("weight", "bias"):
        q, k, v = (f"{theirs}{part}_proj.{kind}" for part in "qkv")
        if all(name in rest for name in (q, k, v)):
            translated[f"{ours}q.{kind}"] = (q, rest.pop(q))
            translated[f"{ours}kv.{kind}"] = (k, torch.cat([rest.pop(k), rest.pop(v)]))
    return translated


def _attention(theirs: str, ours: str, rest: dict[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """Translate an attention to a memory and remove it from `rest`; q, k and v may be separate there."""
    names = [theirs + "in_proj_weight"]
    if names[0] not in rest:
        names = [theirs + f"{kind}_proj_weight" for kind in "qkv"]
    if not all(name in rest for name in (*names, theirs + "in_proj_bias")):
        return {}
    bias = rest.pop(theirs + "in_proj_bias")
    width = len(bias) // 3
    if len(names) == 1:
        weight = rest.pop(names[0])
        q, kv = weight[:width], weight[width:]
    else:
        q, k, v = (rest.pop(name) for name in names)
        kv = torch.cat([k, v])
    values = {"q.weight": q, "q.bias": bias[:width], "kv.weight": kv, "kv.bias": bias[width:]}
    return {ours + part: (names[0], value.contiguous()) for part, value in values.items()}


def assumed(name: str, config: ModelConfig) -> str:
    """What a file of weights does not say, and the name decides, on one line."""
    shown = config.preprocess
    mean, std = (" ".join(f"{x:.3g}" for x in values) for values in (shown.mean, shown.std))
    source = (
        "as its tag says"
        if "@" in name
        else "assumed by the name; for published weights, give their tag (NAME@TAG, or --tag)"
    )
    how = f"resize {shown.resize}, bicubic; mean {mean}, std {std}; activation {config.text.activation}"
    return f"{name}: {how}; {source}."


def main(name: str, path: Path, out: Path) -> None:
    """Write a model folder from a file of open_clip's weights, and print a report. Args: name: NAME or NAME@TAG."""
    imported = import_state(name, read(path))
    folder.write(imported, path, out, f"open_clip {name}")
    folder.show(imported.report, out)
    say(assumed(name, imported.config))
