"""Recipe: everything that decides a run, frozen, typed, serialisable. No torch here, so that help texts are instant."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from kiloword.addresses import public, without_credentials
from kiloword.config.ranges import check

Activation = Literal["gelu", "quick_gelu", "gelu_tanh"]
Precision = Literal["auto", "fp64", "fp32", "bf16"]
EncoderPrecision = Literal["fp32", "bf16"]  # of a model that is used, not trained
Matmul = Literal["auto", "highest", "high", "medium"]
LARGEST = 1 << 26  # bytes of a file of settings
OWN_SPECIAL = {"start": 0, "end": 1, "pad": 2, "mask": 3, "cls": 4, "unc": 5}  # of tokenizers that we train


class BaseSettings:
    """Base of all settings: what is read from disk is validated, unknown keys are errors."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class ImageConfig(BaseSettings):
    """The image tower."""

    size: int = 224  # pixels a side
    patch: int = 16  # pixels a side of a patch; must divide size
    width: int = 768  # of a token
    depth: int = 12  # number of blocks
    heads: int = 12  # of attention in each block
    mlp: int = 3072  # hidden width of the MLP
    stem: Literal["linear", "conv"] = "linear"  # linear: one strided convolution; conv: a few 3x3 ones before it
    stem_bias: bool = False  # whether the convolution that makes the patches has a bias
    class_token: bool = True  # a learned token before the patches
    extra_tokens: int = 0  # learned tokens after the class token: registers, mixture tokens
    uncertainty_token: bool = False  # one more, before the patches, that a Gaussian's variance is read from
    mask_token: bool = False  # a learned token that can replace patches; only where a method trains it
    pre_norm: bool = True  # layer norm before the first block (CLIP)
    activation: Activation = "gelu"  # of the MLP
    norm_eps: float = 1e-5  # of the layer norms
    init_std: float = 0.0  # of positions and tokens; 0: width^-1/2


@dataclass(frozen=True, kw_only=True)
class TextConfig(BaseSettings):
    """The text tower."""

    context: int = 77  # longest caption in tokens, start and end included
    vocab: int = 49408  # rows of the token embedding; a tokenizer that is trained on the data sets it
    width: int = 512  # of a token
    depth: int = 12  # number of blocks
    heads: int = 8  # of attention in each block
    mlp: int = 2048  # hidden width of the MLP
    causal: bool = True  # whether a token sees only those before it
    pad_to_context: bool = False  # emit pads as real tokens (towers trained with visible padding: SigLIP)
    extra_tokens: tuple[str, ...] = ()  # appended after the end token: "unc", "cls", "pad"
    class_place: Literal["next", "last"] = "next"  # position of "cls": behind the text, or the context's last always
    class_sees_itself: bool = True  # False with extra tokens (pad, cls): the shifted mask of open_clip's first CoCa
    norm_words: bool = True  # False: the final norm is the class token's alone, decoders read words without (open_clip)
    special: dict[str, int] = field(default_factory=lambda: dict(OWN_SPECIAL))  # the tokenizer's ids that are no words
    activation: Activation = "gelu"  # of the MLP
    norm_eps: float = 1e-5  # of the layer norms
    init_std: float = 0.0  # of token embeddings and positions; 0: the CLIP values 0.02 and 0.01


@dataclass(frozen=True, kw_only=True)
class HeadConfig(BaseSettings):
    """From tower tokens to features to scores."""

    dim: int = 512  # of the embedding
    image_pool: Literal["cls", "mean", "max", "map", "attentional"] = "cls"  # attentional: CoCa's learned queries
    pool_queries: int = 256  # attentional: what captions are read from; one more is for the vector
    pool_width: int = 0  # attentional: of the queries; 0: the image tower's
    pool_heads: int = 8  # attentional
    text_pool: Literal["last", "mean", "max"] = "last"  # what a text is read from: its last token, or all
    image_projection: bool = True  # whether a linear layer follows the pooling
    text_projection_bias: bool = False  # whether the linear layer behind the pooling has a bias


@dataclass(frozen=True, kw_only=True)
class Preprocess(BaseSettings):
    """From any image to what the image tower was trained on."""

    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)  # of each channel of pixels in [0, 1]
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)  # of each channel of pixels in [0, 1]
    resize: Literal["shortest", "squash"] = "shortest"  # shortest: resize then centre crop


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BaseSettings):
    """Both towers, what the head reads from them, and how pixels are normalised."""

    image: ImageConfig = field(default_factory=ImageConfig)
    text: TextConfig = field(default_factory=TextConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    preprocess: Preprocess = field(default_factory=Preprocess)


@dataclass(frozen=True, kw_only=True)
class OptimConfig(BaseSettings):
    """How weights change."""

    name: Literal["adamw", "muon"] = "adamw"  # muon: hidden matrices by Muon, the rest by AdamW
    lr: float = 1e-3  # of AdamW's parameters
    muon_lr: float = 0.02  # of Muon's matrices
    weight_decay: float = 0.1  # AdamW's matrices; never 1-D parameters, embeddings and positions
    muon_weight_decay: float = 0.0  # of Muon's matrices
    beta1: float = 0.9  # AdamW's decay of the mean gradient
    beta2: float = 0.95  # AdamW's decay of the mean squared gradient
    eps: float = 1e-8  # AdamW's, beside the root of the mean squared gradient
    momentum: float = 0.95  # Muon's
    warmup: float = 0.05  # share of the steps, 2,000 steps at most; or number of steps when 1 or more
    final_lr: float = 0.0  # share of lr at the end of the cosine
    clip: float = 1.0  # largest norm of the gradient, which is scaled down to it; 0: gradients are not clipped
    explode: float = 100.0  # a step whose gradient norm is so many times the usual one is skipped; 0: only if no number
    scale_lr: float = 1.0  # factor for the head's scale and bias
    text_lr: float = 1.0  # factor for the text tower, which else forgets words before the image tower sees them
    ema: float = 0.0  # decay of an average of the weights that is evaluated and saved; 0: none


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(BaseSettings):
    """Changes to training images and captions, drawn per (seed, epoch, row)."""

    crop: float = 1.0  # least share of the area that RandomResizedCrop keeps; 1: no random crop
    ratio: float = 4 / 3  # greatest aspect ratio of a crop; the least is its inverse
    flip: float = 0.0  # probability of a mirror image
    jitter: float = 0.0  # probability of colour jitter
    jitter_strength: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)  # brightness, contrast, saturation, hue
    grayscale: float = 0.0  # probability
    blur: float = 0.0  # probability of a Gaussian blur
    blur_sigma: tuple[float, float] = (0.1, 2.0)  # pixels
    drop_words: float = 0.0  # probability that a word of a caption is left out; at least one stays


@dataclass(frozen=True, kw_only=True)
class DataConfig(BaseSettings):
    """What is read, and how."""

    sources: tuple[str, ...] = ("scenes",)
    weights: tuple[float, ...] = ()  # how often each source's rows come in an epoch; (): once
    val: str | None = None
    extra_captions: tuple[str, ...] = ()  # parquet tables (key, captions) whose captions join the images' own
    raw_captions: bool = True  # whether the images' own captions stay beside the extra ones
    features: tuple[str, ...] = ()  # feature stores (`kiloword embed`), joined by key
    captions: int | Literal["one", "all"] = "one"  # an image's captions in a batch: one redrawn each epoch, N, all
    together: int = 1  # consecutive rows that stand in a batch together: groups of hard negatives
    decoder: Literal["pillow", "opencv", "simplejpeg"] = "pillow"
    bad_share: float = 0.01  # stop when more than this share of the rows is bad
    tokenizer_vocab: int = 4096  # at most; of the tokenizer trained on the data's captions
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        """URLs are kept without credentials, which are remembered: see `kiloword.addresses`."""
        for name in ("sources", "extra_captions", "features"):
            object.__setattr__(self, name, tuple(map(public, getattr(self, name))))
        if self.val is not None:
            object.__setattr__(self, "val", public(self.val))


@dataclass(frozen=True, kw_only=True)
class Recipe(BaseSettings):
    """A run. Equal recipes on equal data give equal weights, bit for bit, on CPU."""

    method: str  # preset, or "module:preset"
    settings: dict[str, Any] = field(default_factory=dict)  # the preset's own
    size: str = "tiny"
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    steps: int = 1000
    batch: int = 128  # the global batch, over ranks and micro-batches
    micro: int = 0  # images a micro-batch and rank; 0: all at once
    chunk: int = 0  # rows and columns a block of pairs; 0: chosen
    precision: Precision = "fp32"  # auto: by size and device, settled before the run begins (`by_device.settle`)
    matmul: Matmul = "highest"  # of products in fp32, losses among them: high is TF32 on CUDA; auto: by device
    freeze: Literal["none", "image", "text"] = "none"
    init: str | None = None  # model folder to start from
    seed: int = 0


def _size(
    patch: int, iw: int, idepth: int, ih: int, tw: int, tdepth: int, th: int, dim: int, mlp: float = 4
) -> ModelConfig:
    return ModelConfig(
        image=ImageConfig(patch=patch, width=iw, depth=idepth, heads=ih, mlp=int(iw * mlp)),
        text=TextConfig(width=tw, depth=tdepth, heads=th, mlp=tw * 4),
        head=HeadConfig(dim=dim),
    )


def sizes() -> dict[str, ModelConfig]:
    """The named sizes. debug: tests; tiny: trains on CPU in minutes; the rest: the field's (open_clip's dimensions)."""
    small = _size(8, 128, 4, 8, 128, 3, 8, 128)
    # what lets it learn within minutes (docs/log.md): positions as loud as content, max read-outs, fine patches
    tiny = replace(
        small,
        image=replace(small.image, size=64, stem="conv", pre_norm=False, init_std=1.0),
        text=replace(small.text, context=48, vocab=4096, init_std=0.3),
        head=replace(small.head, image_pool="max", text_pool="max"),
    )
    debug = replace(
        tiny,
        image=ImageConfig(size=32, patch=16, width=32, depth=2, heads=2, mlp=64),
        text=TextConfig(context=32, vocab=512, width=32, depth=2, heads=2, mlp=64),
        head=HeadConfig(dim=16),
    )
    return {
        "debug": debug,
        "tiny": tiny,
        "s16": _size(16, 384, 12, 6, 384, 12, 6, 384),
        "b32": _size(32, 768, 12, 12, 512, 12, 8, 512),
        "b16": _size(16, 768, 12, 12, 512, 12, 8, 512),
        "l16": _size(16, 1024, 24, 16, 768, 12, 12, 768),
        "l14": _size(14, 1024, 24, 16, 768, 12, 12, 768),
        "h14": _size(14, 1280, 32, 16, 1024, 24, 16, 1024),
        "g14": _size(14, 1408, 40, 16, 1024, 24, 16, 1024, mlp=48 / 11),
    }


@dataclass(frozen=True, kw_only=True)
class ModelFile(BaseSettings):
    """What `config.json` of a model folder says."""

    method: str
    settings: dict[str, Any]
    model: ModelConfig
    size: str = "custom"
    steps: int = 0  # trained for
    data: str = ""  # what it was trained on
    format: Literal["kiloword-model-1"] = "kiloword-model-1"


Config = TypeVar("Config")


def only(settings: Any, kind: type[Config]) -> Config:
    """The part of a method's settings that one of the dataclasses it is made of knows."""
    return kind(**{f.name: getattr(settings, f.name) for f in fields(kind)})  # type: ignore[arg-type]


def read_config(path: Path, kind: type[Config]) -> Config:
    """Read and validate a json file as a settings dataclass. Raises: ValueError naming the file and the bad keys."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes.")
        settings = parse(json.loads(path.read_text(encoding="utf-8")), kind)
        check(settings, prefix="")
        return settings
    except (ValueError, RecursionError) as e:  # the second: thousands of nested brackets
        raise ValueError(f"{path} cannot be used: {e} It was damaged, or written by another version.") from e


def parse(value: Any, kind: type[Config]) -> Config:
    """Validate plain data as a settings dataclass. Raises: ValueError for unknown keys and wrong types."""
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(without_credentials(value))
    except PydanticUserError as e:  # of somebody's own method
        raise ValueError(f"{kind.__name__} is no class of settings: expected fields of plain data.") from e
    except ValidationError as e:
        problems = [f"{'.'.join(map(str, x['loc'])) or 'it'}: {x['msg'].lower()}" for x in e.errors()]
        raise ValueError("; ".join(problems[:3]) + ".") from e
