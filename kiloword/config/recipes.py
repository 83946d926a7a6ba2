"""Recipe: all settings that determine a run, frozen, typed, serializable. No torch here, so that help is instant."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from kiloword.addresses import public, without_credentials
from kiloword.config.ranges import check

Activation = Literal["gelu", "quick_gelu", "gelu_tanh"]
Precision = Literal["auto", "fp64", "fp32", "bf16"]
EncoderPrecision = Literal["fp32", "bf16"]  # of a trained model
Matmul = Literal["auto", "highest", "high", "medium"]
LARGEST = 1 << 26  # largest file of settings in bytes
OWN_SPECIAL = {"start": 0, "end": 1, "pad": 2, "mask": 3, "cls": 4, "unc": 5}  # of tokenizers trained by kiloword


class BaseSettings:
    """Base of all settings: pydantic validates those read from disk; unknown keys are errors."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class ImageConfig(BaseSettings):
    """The image tower."""

    size: int = 224  # height and width in pixels
    patch: int = 16  # height and width of a patch in pixels; must divide size
    width: int = 768  # of a token
    depth: int = 12  # number of blocks
    heads: int = 12  # of attention in each block
    mlp: int = 3072  # hidden width of the MLP
    stem: Literal["linear", "conv"] = "linear"  # linear: one strided convolution; conv: 3x3 convolutions before it
    stem_bias: bool = False  # bias of the patch convolution
    class_token: bool = True  # a learned token before the patches
    extra_tokens: int = 0  # number of learned tokens after the class token: registers, mixture tokens
    uncertainty_token: bool = False  # a learned token before the patches, for a Gaussian's variance
    mask_token: bool = False  # a learned token that replaces masked patches; only where a method trains it
    pre_norm: bool = True  # layer norm before the first block (CLIP)
    activation: Activation = "gelu"  # of the MLP
    norm_eps: float = 1e-5  # of the layer norms
    init_std: float = 0.0  # standard deviation of initial positions and tokens; 0: width^-1/2


@dataclass(frozen=True, kw_only=True)
class TextConfig(BaseSettings):
    """The text tower."""

    context: int = 77  # longest caption in tokens, including start and end
    vocab: int = 49408  # rows of the token embedding; set by the tokenizer if that is trained on the data
    width: int = 512  # of a token
    depth: int = 12  # number of blocks
    heads: int = 8  # of attention in each block
    mlp: int = 2048  # hidden width of the MLP
    causal: bool = True  # causal attention: a token attends only to earlier ones
    pad_to_context: bool = False  # attend to pads as to other tokens (SigLIP towers are trained so)
    extra_tokens: tuple[str, ...] = ()  # appended after the end token: "unc", "cls", "pad"
    class_place: Literal["next", "last"] = "next"  # position of "cls": after the text, or the last of the context
    class_sees_itself: bool = True  # False, with extra tokens pad, cls: the off-by-one mask of open_clip's CoCa
    norm_words: bool = True  # False: the final norm is the class token's only, not the words' (open_clip)
    special: dict[str, int] = field(default_factory=lambda: dict(OWN_SPECIAL))  # the tokenizer's ids of special tokens
    activation: Activation = "gelu"  # of the MLP
    norm_eps: float = 1e-5  # of the layer norms
    init_std: float = 0.0  # standard deviation of initial embeddings and positions; 0: as CLIP, 0.02 and 0.01


@dataclass(frozen=True, kw_only=True)
class HeadConfig(BaseSettings):
    """The head: from tokens of the towers to features and scores."""

    dim: int = 512  # size of the embedding
    image_pool: Literal["cls", "mean", "max", "map", "attentional"] = "cls"  # attentional: CoCa's learned queries
    pool_queries: int = 256  # attentional: number of queries for captioning; one more makes the image feature
    pool_width: int = 0  # attentional: width of the queries; 0: the image tower's
    pool_heads: int = 8  # attentional: attention heads
    text_pool: Literal["last", "mean", "max"] = "last"  # pooling of text tokens; last: the last token only
    image_projection: bool = True  # a linear layer after pooling
    text_projection_bias: bool = False  # bias of the linear layer after pooling


@dataclass(frozen=True, kw_only=True)
class Preprocess(BaseSettings):
    """Preprocessing of images as in the training of the image tower."""

    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)  # of each channel of pixels in [0, 1]
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)  # of each channel of pixels in [0, 1]
    resize: Literal["shortest", "squash"] = "shortest"  # shortest: resize the shortest side, then centre crop


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BaseSettings):
    """Both towers, what the head reads from them, and how pixels are normalised."""

    image: ImageConfig = field(default_factory=ImageConfig)
    text: TextConfig = field(default_factory=TextConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    preprocess: Preprocess = field(default_factory=Preprocess)


@dataclass(frozen=True, kw_only=True)
class OptimConfig(BaseSettings):
    """The optimizer."""

    name: Literal["adamw", "muon"] = "adamw"  # muon: hidden matrices by Muon, the rest by AdamW
    lr: float = 1e-3  # learning rate of AdamW
    muon_lr: float = 0.02  # learning rate of Muon
    weight_decay: float = 0.1  # of AdamW's matrices; 1-D parameters, embeddings and positions have none
    muon_weight_decay: float = 0.0  # of Muon's matrices
    beta1: float = 0.9  # AdamW's decay of the mean gradient
    beta2: float = 0.95  # AdamW's decay of the mean squared gradient
    eps: float = 1e-8  # AdamW's, added to the root of the mean squared gradient
    momentum: float = 0.95  # Muon's
    warmup: float = 0.05  # below 1: share of the steps, at most 2,000; else number of steps
    final_lr: float = 0.0  # learning rate at the end of the cosine, as share of lr
    clip: float = 1.0  # clip the gradient to this norm; 0: no clipping
    explode: float = 100.0  # skip steps whose gradient norm is this multiple of the usual one; 0: only NaN or infinite
    scale_lr: float = 1.0  # learning-rate multiplier of the head's scale and bias
    text_lr: float = 1.0  # learning-rate multiplier of the text tower; lower it to prevent early forgetting
    ema: float = 0.0  # decay of the weight average that is evaluated and saved; 0: no averaging


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(BaseSettings):
    """Augmentation of training images and captions, drawn per (seed, epoch, row)."""

    crop: float = 1.0  # smallest share of the area in a RandomResizedCrop; 1: no random crop
    ratio: float = 4 / 3  # largest aspect ratio of a crop; the smallest is its inverse
    flip: float = 0.0  # probability of a horizontal flip
    jitter: float = 0.0  # probability of colour jitter
    jitter_strength: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)  # brightness, contrast, saturation, hue
    grayscale: float = 0.0  # probability of conversion to grayscale
    blur: float = 0.0  # probability of a Gaussian blur
    blur_sigma: tuple[float, float] = (0.1, 2.0)  # range in pixels
    drop_words: float = 0.0  # probability of dropping a word of a caption; at least one stays


@dataclass(frozen=True, kw_only=True)
class DataConfig(BaseSettings):
    """The data, and how it is read."""

    sources: tuple[str, ...] = ("scenes",)
    weights: tuple[float, ...] = ()  # passes over each source in an epoch; (): one
    val: str | None = None
    extra_captions: tuple[str, ...] = ()  # parquet tables (key, captions) whose captions join the images' own
    raw_captions: bool = True  # whether the images' own captions stay beside the extra ones
    features: tuple[str, ...] = ()  # feature stores (`kiloword embed`), joined by key
    captions: int | Literal["one", "all"] = "one"  # an image's captions in a batch: one redrawn each epoch, N, all
    together: int = 1  # consecutive rows that stand in a batch together: groups of hard negatives
    decoder: Literal["pillow", "opencv", "simplejpeg"] = "pillow"
    bad_share: float = 0.01  # stop when a larger share of the rows is bad
    tokenizer_vocab: int = 4096  # largest vocabulary of the tokenizer trained on the captions
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        """Strip credentials from URLs; `kiloword.addresses` remembers them."""
        for name in ("sources", "extra_captions", "features"):
            object.__setattr__(self, name, tuple(map(public, getattr(self, name))))
        if self.val is not None:
            object.__setattr__(self, "val", public(self.val))


@dataclass(frozen=True, kw_only=True)
class Recipe(BaseSettings):
    """A run. On a CPU, equal recipes on equal data give equal weights, bit for bit."""

    method: str  # preset, or "module:preset"
    settings: dict[str, Any] = field(default_factory=dict)  # of the preset
    size: str = "tiny"
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    steps: int = 1000
    batch: int = 128  # images in the global batch, over all ranks and micro-batches
    micro: int = 0  # images in a micro-batch of a rank; 0: all at once
    chunk: int = 0  # rows and columns of a block of pairs; 0: automatic
    precision: Precision = "fp32"  # auto: chosen by size and device before the run (`by_device.settle`)
    matmul: Matmul = "highest"  # precision of fp32 matrix products; high: TF32 on CUDA; auto: by device
    freeze: Literal["none", "image", "text"] = "none"  # tower that is not trained
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
    """The named sizes. debug: for tests; tiny: trains on a CPU in minutes; others: open_clip's dimensions."""
    small = _size(8, 128, 4, 8, 128, 3, 8, 128)
    # it learns within minutes (docs/log.md) by positions of large norm, max pooling and small patches
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
    """The contents of `config.json` in a model folder."""

    method: str
    settings: dict[str, Any]
    model: ModelConfig
    size: str = "custom"
    steps: int = 0  # of the training
    data: str = ""  # training data
    format: Literal["kiloword-model-1"] = "kiloword-model-1"


Config = TypeVar("Config")


def only(settings: Any, kind: type[Config]) -> Config:
    """The fields of a method's settings that belong to one of its dataclasses."""
    return kind(**{f.name: getattr(settings, f.name) for f in fields(kind)})  # type: ignore[arg-type]


def read_config(path: Path, kind: type[Config]) -> Config:
    """Read and validate a JSON file as a settings dataclass. Raises: ValueError naming the file and the bad keys."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes.")
        settings = parse(json.loads(path.read_text(encoding="utf-8")), kind)
        check(settings, prefix="")
        return settings
    except (ValueError, RecursionError) as e:  # RecursionError: thousands of nested brackets
        raise ValueError(f"{path} cannot be used: {e} It was damaged, or written by another version.") from e


def parse(value: Any, kind: type[Config]) -> Config:
    """Validate plain data as a settings dataclass. Raises: ValueError for unknown keys and wrong types."""
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(without_credentials(value))
    except PydanticUserError as e:  # of a user-defined method
        raise ValueError(f"{kind.__name__} is not a class of settings: expected fields of plain data.") from e
    except ValidationError as e:
        problems = [f"{'.'.join(map(str, x['loc'])) or 'it'}: {x['msg'].lower()}" for x in e.errors()]
        raise ValueError("; ".join(problems[:3]) + ".") from e
