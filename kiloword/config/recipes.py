"""Recipe: all settings that determine a run, frozen, typed, serializable. No torch here, so that help is instant."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

from kiloword.addresses import public
from kiloword.config.settings import ABOVE_0, BELOW_1, BaseSettings, about, setting
from kiloword.errors import suggestion

Activation = Literal["gelu", "quick_gelu", "gelu_tanh"]
Precision = Literal["auto", "fp64", "fp32", "bf16"]
EncoderPrecision = Literal["fp32", "bf16"]  # of a trained model
Nearest = Literal["cosine", "csd"]
"""Which images and texts are near: by the cosine of their means, or by closed-form sampled distance (Gaussians)."""
Resize = Literal["shortest", "squash"] | int
Matmul = Literal["auto", "highest", "high", "medium"]
DEPTH = 1024  # largest number of layers of a tower or a decoder
NO_MICRO = (
    "batch norm needs the statistics of the whole batch, which micro-batches do not have: omit --micro (more GPUs, "
    "--checkpointing whole and --parallel fsdp save memory too), or choose a tower without batch norm."
)
SHAPE = [f"{tower}.{name}" for tower in ("image", "text") for name in ("width", "depth", "heads", "mlp")]
TOWERS = attrgetter("image.patch", "image.tower", *SHAPE)
OWN_SPECIAL = {"start": 0, "end": 1, "pad": 2, "mask": 3, "cls": 4, "unc": 5}  # of tokenizers trained by kiloword


@dataclass(frozen=True, kw_only=True)
class TrunkConfig(BaseSettings):
    """A trunk: the tower of another library whose tokens a tower takes in place of patches or words; no code."""

    name: str = setting("", "efficientnet-lite0, timm:NAME, open_clip:NAME, hf, ...; empty: none", flag="")
    width: int = setting(0, "width of its tokens", 0, 1 << 16, flag="")
    prefix: int = setting(0, "tokens before the map: class token, registers", 0, 4096, flag="")
    whole: bool = setting(False, "its one vector, with its own pooling and projection", flag="")
    grid: int = setting(0, "of images: height and width of the map of tokens", 0, 1 << 13, flag="")
    config: dict[str, Any] = field(default_factory=dict, metadata=about("config.json of transformers", flag=""))


@dataclass(frozen=True, kw_only=True)
class ImageConfig(BaseSettings):
    """The image tower."""

    trunk: TrunkConfig = field(default_factory=TrunkConfig)

    tower: Literal["vit", "clip-resnet", "resnet"] = setting(
        "vit", "architecture; for resnets, width is the output's, depth is the number of blocks, and patch is 32"
    )
    size: int = setting(224, "height and width in pixels", 1, 1 << 13)
    patch: int = setting(16, "height and width of a patch in pixels; pixels beyond whole patches are unused", 1, DEPTH)
    width: int = setting(768, "width of a token", 1, 1 << 16)
    depth: int = setting(12, "number of blocks; 0: only with --image-tower", 0, DEPTH)
    heads: int = setting(12, "attention heads of each block", 1, DEPTH)
    mlp: int = setting(3072, "hidden width of the MLP", 1, 1 << 20)
    stem: Literal["linear", "conv"] = setting(
        "linear", "conv: 3x3 convolutions in place of one strided one", needs="tower=vit"
    )
    stem_bias: bool = setting(False, "bias of the patch convolution", needs="tower=vit")
    class_token: bool = setting(True, "a learned token before the patches")
    extra_tokens: int = setting(0, "number of learned tokens after the class token: registers, mixture tokens", 0, 4096)
    uncertainty_token: bool = setting(False, "a learned token before the patches, for a Gaussian's variance")
    uncertainty_blocks: int = setting(0, "blocks beside the last ones for the uncertainty token; 0: learned", 0, DEPTH)
    mask_token: bool = setting(False, "a learned token that replaces masked patches; only where a method trains it")
    pre_norm: bool = setting(True, "layer norm before the first block (CLIP)", needs="tower=vit")
    activation: Activation = setting("gelu", "activation of the MLP")
    norm_eps: float = setting(1e-5, "epsilon of the layer norms", 1e-20, 1)
    init_std: float = setting(0.0, "deviation of initial positions and tokens; 0: width^-1/2", 0, 100)


@dataclass(frozen=True, kw_only=True)
class TextConfig(BaseSettings):
    """The text tower."""

    trunk: TrunkConfig = field(default_factory=TrunkConfig)
    context: int = setting(77, "longest caption in tokens, including start and end", 3, 1 << 16)
    vocab: int = setting(49408, "rows of the token embedding; set by a tokenizer trained on the data", 1, 1 << 22)
    width: int = setting(512, "width of a token", 1, 1 << 16)
    depth: int = setting(12, "number of blocks; 0: only with --text-tower", 0, DEPTH)
    heads: int = setting(8, "attention heads of each block", 1, DEPTH)
    mlp: int = setting(2048, "hidden width of the MLP", 1, 1 << 20)
    causal: bool = setting(True, "causal attention: a token attends only to earlier ones")
    pad_to_context: bool = setting(False, "attend to pads as to other tokens (SigLIP towers are trained so)")
    extra_tokens: tuple[Literal["unc", "cls", "pad"], ...] = setting((), 'tokens after the end: "unc", "cls", "pad"')
    uncertainty_blocks: int = setting(
        0, 'blocks beside the tower\'s last ones that make the output of "unc"; 0: the tower itself', 0, DEPTH
    )
    class_place: Literal["next", "last"] = setting("next", 'position of "cls": after the text, or last of the context')
    class_sees_itself: bool = setting(True, "False, with tokens pad, cls: as in open_clip's CoCa, off by one")
    norm_words: bool = setting(True, "False: apply the final norm to the class token only (open_clip)")
    special: dict[str, int] = field(
        default_factory=lambda: dict(OWN_SPECIAL), metadata=about("the tokenizer's ids of special tokens")
    )
    activation: Activation = setting("gelu", "activation of the MLP")
    norm_eps: float = setting(1e-5, "epsilon of the layer norms", 1e-20, 1)
    init_std: float = setting(0.0, "deviation of initial embeddings and positions; 0: as CLIP, 0.02 and 0.01", 0, 100)


@dataclass(frozen=True, kw_only=True)
class HeadConfig(BaseSettings):
    """The head: from tokens of the towers to features and scores."""

    dim: int = setting(512, "size of the embedding", 1, 1 << 16)
    image_pool: Literal["cls", "mean", "max", "map", "attention", "attentional"] = setting(
        "cls", "pooling of image tokens; attention: of CLIP's resnets, map: SigLIP's, attentional: CoCa's"
    )
    pool_queries: int = setting(256, "attentional: queries for captions", 1, 1 << 16, needs="image_pool=attentional")
    pool_width: int = setting(
        0, "attentional: width of the queries; 0: the image tower's", 0, 1 << 16, needs="image_pool=attentional"
    )
    pool_heads: int = setting(8, "attentional: attention heads", 1, DEPTH, needs="image_pool=attentional")
    text_pool: Literal["last", "mean", "max"] = setting("last", "pooling of text tokens; last: the last token only")
    image_projection: bool = setting(True, "a linear layer after pooling")
    image_projection_bias: bool = setting(False, "bias of that layer (CLIP's resnets)", needs="image_projection=True")
    text_projection_bias: bool = setting(False, "bias of the linear layer after pooling")


@dataclass(frozen=True, kw_only=True)
class Preprocess(BaseSettings):
    """Preprocessing of images as in the training of the image tower."""

    mean: tuple[float, float, float] = setting((0.48145466, 0.4578275, 0.40821073), "of values in [0, 1]", -1000, 1000)
    std: tuple[float, float, float] = setting((0.26862954, 0.26130258, 0.27577711), "of values in [0, 1]", 1e-6, 1000)
    resize: Resize = setting(
        "shortest", "shortest: resize the shortest side, then centre crop; N: resize it to N pixels", 1, 1 << 13
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BaseSettings):
    """Both towers, what the head reads from them, and how pixels are normalised."""

    image: ImageConfig = field(default_factory=ImageConfig)
    text: TextConfig = field(default_factory=TextConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    preprocess: Preprocess = field(default_factory=Preprocess)
    init_std: float = setting(0.0, "deviation of all initial weights (biases 0, norms 1); 0: of each layer", 0, 100)


@dataclass(frozen=True, kw_only=True)
class OptimConfig(BaseSettings):
    """The optimizer."""

    name: Literal["adamw", "adamp", "muon"] = setting("adamw", "adamp: PCME++'s; muon: of matrices, AdamW's rest")
    lr: float = setting(1e-3, "learning rate of AdamW", 0, 100)
    muon_lr: float = setting(0.02, "learning rate of Muon", 0, 100, needs="name=muon")
    weight_decay: float = setting(0.1, "AdamW; vectors, embeddings and positions have none", 0, 100)
    muon_weight_decay: float = setting(0.0, "weight decay of Muon", 0, 100, needs="name=muon")
    beta1: float = setting(0.9, "AdamW: decay of the mean gradient", 0, BELOW_1)
    beta2: float = setting(0.95, "AdamW: decay of the mean squared gradient", 0, BELOW_1)
    eps: float = setting(1e-8, "AdamW: added to the root of the mean squared gradient", 1e-20, 1)
    delta: float = setting(0.1, "AdamP: projects where cosine * sqrt(n) is below it", 0, 100, needs="name=adamp")
    wd_ratio: float = setting(0.1, "AdamP: share of the weight decay of projected weights", 0, 1, needs="name=adamp")
    momentum: float = setting(0.95, "momentum of Muon", 0, BELOW_1, needs="name=muon")
    warmup: float = setting(0.05, "below 1: share of the steps, at most 2,000; else number of steps", 0, 1e12)
    final_lr: float = setting(0.0, "learning rate at the end of the cosine, as share of lr", 0, 100)
    clip: float = setting(1.0, "clip the gradient to this norm; 0: no clipping", 0, 1e12)
    explode: float = setting(
        100.0, "skip steps of gradient norms above this multiple of their mean; 0: only NaN", 0, 1e12
    )
    scale_lr: float = setting(1.0, "learning-rate multiplier of the head's scale and bias", 0, 1e4)
    text_lr: float = setting(1.0, "learning-rate multiplier of the text tower; lower it to prevent forgetting", 0, 1e4)
    trunk_lr: float = setting(0.1, "learning-rate multiplier of trunks (AdamW's, not Muon's), if trained", 0, 1e4)
    layer_decay: float = setting(1.0, "learning rate of a block as share of the block's above it; 1: off", ABOVE_0, 1)
    ema: float = setting(0.0, "decay of the weight average that is evaluated and saved; 0: no averaging", 0, 1)


@dataclass(frozen=True, kw_only=True)
class LoraConfig(BaseSettings):
    """Low-rank adapters of pretrained towers (LoRA, arXiv:2106.09685)."""

    rank: int = setting(0, "rank of the change of each adapted matrix; 0: no adapters", 0, 1 << 16)
    alpha: float = setting(16.0, "adapters are multiplied by alpha / rank", ABOVE_0, 1e6, needs="rank!=0")
    targets: tuple[str, ...] = setting(
        ("auto",),
        "layers by name, [image:|text:][BLOCKS:]NAME,...; all; auto: qkv,out, but all of another library's model",
        needs="rank!=0",
    )
    save: Literal["merged", "apart"] = setting("merged", "apart: also adapters alone, to OUT/adapter", needs="rank!=0")


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(BaseSettings):
    """Augmentation of training images and captions, drawn per (seed, epoch, row)."""

    crop: float = setting(1.0, "smallest share of the area in a RandomResizedCrop; 1: no random crop", 0.001, 1)
    ratio: float = setting(4 / 3, "largest aspect ratio of a crop; smallest: its inverse", 1, 100, needs="crop!=1.0")
    flip: float = setting(0.0, "probability of a horizontal flip", 0, 1)
    jitter: float = setting(0.0, "probability of colour jitter", 0, 1)
    jitter_strength: tuple[float, float, float, float] = setting(
        (0.4, 0.4, 0.4, 0.1), "brightness, contrast, saturation, hue", 0, 100, needs="jitter!=0.0"
    )
    grayscale: float = setting(0.0, "probability of conversion to grayscale", 0, 1)
    blur: float = setting(0.0, "probability of a Gaussian blur", 0, 1)
    blur_sigma: tuple[float, float] = setting((0.1, 2.0), "range of a blur's deviation", 0, 1000, needs="blur!=0.0")
    drop_words: float = setting(0.0, "probability of dropping a word of a caption; at least one stays", 0, 1)
    drop_patches: float = setting(
        0.0, "share of its patches (with a trunk: places of the map of tokens) that an image loses", 0, BELOW_1
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig(BaseSettings):
    """The data, and how it is read."""

    sources: tuple[str, ...] = setting(
        ("scenes",),
        "folder of tars, brace pattern, csv/tsv/parquet, image folder, scenes; train-part:SRC holds out a tenth, which "
        "--val val-part:SRC evaluates",
        flag="data",
    )
    weights: tuple[float, ...] = setting((), "how often each --data source is read per epoch; default: once each")
    val: tuple[str, ...] = setting(
        (), "data sets to evaluate on during training: SRC (retrieval, zero-shot, VQA by what it holds), or TASK=SRC"
    )
    extra_captions: tuple[str, ...] = setting((), "parquet tables (key, captions) whose captions join the images' own")
    raw_captions: bool = setting(True, "keep the images' own captions beside the extra ones")
    keep: tuple[str, ...] = setting((), "keep-lists (`kiloword audit`): train on the pairs that they keep")
    features: tuple[str, ...] = setting((), "feature stores (`kiloword embed`), joined by row or key")
    image_features: tuple[str, ...] = setting((), "tokens of images in place of their pixels (`embed --tokens`)")
    text_features: tuple[str, ...] = setting((), "tokens of captions in place of their words (`embed --tokens`)")
    captions: int | Literal["one", "all"] = setting(
        "one", "captions (vqa: answers) of an image in a batch: one (drawn each epoch), all, or N", 1
    )
    rows: int = setting(0, "train on a fixed subset of this many rows, with partners from all; 0: all rows", 0)
    first_captions: bool = setting(
        False,
        "of N captions, the first N of an image in every epoch (its own, then extra ones), not others each epoch",
        needs="captions!=all",
    )
    together: int = setting(1, "group size: consecutive rows that always share a batch (hard negatives)", 1)
    decoder: Literal["pillow", "simplejpeg"] = setting("pillow", "decoder of images; simplejpeg is faster")
    bad_share: float = setting(0.01, "stop when a larger share of the samples is bad", 0, 1)
    tokenizer: str = setting("own", "own: trained on the captions; clip, siglip, or a file (docs/training.md)")
    tokenizer_vocab: int = setting(
        4096, "largest vocabulary of a tokenizer of the captions", 262, 1 << 22, flag="vocab"
    )
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        """Strip credentials from URLs; `kiloword.addresses` remembers them."""
        for name in ("sources", "val", "extra_captions", "keep", "features", "image_features", "text_features"):
            object.__setattr__(self, name, tuple(map(public, getattr(self, name))))


@dataclass(frozen=True, kw_only=True)
class Recipe(BaseSettings):
    """A run. On a CPU, equal recipes on equal data give equal weights, bit for bit."""

    method: str = field(metadata=about(flag=""))  # preset, or "module:preset"
    settings: dict[str, Any] = field(default_factory=dict, metadata=about(flag=""))  # of the preset
    steps: int = setting(1000, "", 1, flag="")
    size: str = setting("tiny", "size of the towers (`kiloword sizes` lists them)")
    init: str | None = setting(None, "model folder to start from, with its towers and image size")
    image_tower: str = setting("", "image tower of another library: efficientnet-lite0[:FILE] (docs/towers.md)")
    text_tower: str = setting("", "text tower of another library: hf:FOLDER, minilm[:FOLDER] (docs/towers.md)")
    freeze: tuple[str, ...] = setting(
        (), "what is not trained: image, text, image:trunk, image:0-8 (blocks), ...; none; default: trunks"
    )
    unfreeze: tuple[float, ...] = setting(
        (), "share of the steps after which frozen blocks are trained; two: one by one from the top", 0, BELOW_1
    )
    batch: int = setting(128, "images in a step, over all ranks", 1)
    micro: int = setting(0, "images in a micro-batch of a rank; 0: the rank's whole share of the batch", 0)
    chunk: int = setting(0, "rows and columns of a block of pairs; 0: automatic", 0)
    precision: Precision = setting("fp32", "precision of the computation; weights are fp32; auto: by size and device")
    matmul: Matmul = setting("highest", "precision of fp32 matrix products; high: TF32 on CUDA; auto: by device")
    seed: int = setting(0, "seed of initial weights, order and augmentation")
    data: DataConfig = field(default_factory=DataConfig, metadata=about(flag=""))
    optim: OptimConfig = field(default_factory=OptimConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    model: ModelConfig = field(default_factory=ModelConfig)


def _size(
    patch: int, iw: int, idepth: int, ih: int, tw: int, tdepth: int, th: int, dim: int, mlp: float = 4
) -> ModelConfig:
    return ModelConfig(
        image=ImageConfig(patch=patch, width=iw, depth=idepth, heads=ih, mlp=int(iw * mlp)),
        text=TextConfig(width=tw, depth=tdepth, heads=th, mlp=tw * 4),
        head=HeadConfig(dim=dim),
    )


def _resnet(clip: bool) -> ModelConfig:
    """A ResNet-50 with the text tower of CLIP's (arXiv:2103.00020, table 19)."""
    base = _size(32, 2048, 16, 32, 512, 12, 8, 1024)
    return replace(
        base,
        image=replace(base.image, tower="clip-resnet" if clip else "resnet", class_token=False, pre_norm=False),
        head=replace(base.head, image_pool="attention" if clip else "mean", image_projection_bias=clip),
    )


def _learned(base: ModelConfig, **image: Any) -> ModelConfig:
    """A model for small data: a vocabulary trained on them, max pooling, no norm before the first block."""
    return replace(
        base,
        image=replace(base.image, pre_norm=False, **image),
        text=replace(base.text, context=48, vocab=4096, init_std=0.3),
        head=replace(base.head, image_pool="max", text_pool="max"),
    )


def model_of_size(name: str) -> ModelConfig:
    """The model of a named size. Raises: ValueError for another name; for one of open_clip's it suggests ours."""
    named = sizes()
    if name not in named:
        ours = suggestion(re.sub(r"vit|[^a-z0-9]", "", name.lower()), named)  # of ViT-B-32: b32
        raise ValueError(f"unknown size {name!r}: expected one of {', '.join(named)}.{ours}")
    return named[name]


def sizes() -> dict[str, ModelConfig]:
    """The named sizes. debug: for tests; tiny: trains on a CPU in minutes; top: above towers of other
    libraries; others: open_clip's dimensions."""
    # it learns within minutes (research/log.md) by positions of large norm, max pooling and small patches
    tiny = _learned(_size(8, 128, 4, 8, 128, 3, 8, 128), size=64, stem="conv", init_std=1.0)
    debug = replace(
        tiny,
        image=ImageConfig(size=32, width=32, depth=2, heads=2, mlp=64),
        text=TextConfig(context=32, vocab=512, width=32, depth=2, heads=2, mlp=64),
        head=HeadConfig(dim=16),
    )
    # one block of images is worth 0.02 of R@1 on photos (research/log.md)
    top = _learned(_size(32, 512, 1, 8, 256, 1, 8, 512))
    return {
        "debug": debug,
        "tiny": tiny,
        "top": top,
        "s16": _size(16, 384, 12, 6, 384, 12, 6, 384),
        "b32": _size(32, 768, 12, 12, 512, 12, 8, 512),
        "b16": _size(16, 768, 12, 12, 512, 12, 8, 512),
        "rn50": _resnet(clip=True),
        "rn50-plain": _resnet(clip=False),
        "l16": _size(16, 1024, 24, 16, 768, 12, 12, 768),
        "l14": _size(14, 1024, 24, 16, 768, 12, 12, 768),
        "h14": _size(14, 1280, 32, 16, 1024, 24, 16, 1024),
        "g14": _size(14, 1408, 40, 16, 1024, 24, 16, 1024, mlp=48 / 11),
        "bigg": _size(14, 1664, 48, 16, 1280, 32, 20, 1280, mlp=64 / 13),
    }


def size_of(model: ModelConfig) -> str:
    """The named size whose towers a model has, else "custom"."""
    return next((name for name, named in sizes().items() if TOWERS(named) == TOWERS(model)), "custom")


@dataclass(frozen=True, kw_only=True)
class ModelFile(BaseSettings):
    """The contents of `config.json` in a model folder."""

    method: str
    settings: dict[str, Any]
    model: ModelConfig
    size: str = "custom"
    steps: int = 0  # of the training
    data: str = ""  # training data, in brackets the weights that the training began with and how it changed them
    format: Literal["kiloword-model-1"] = "kiloword-model-1"
