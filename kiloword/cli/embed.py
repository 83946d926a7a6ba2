"""The verbs embed and audit: features of a data set, and what is wrong with it. No torch at import: help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from kiloword.apps.audit import AuditOptions
from kiloword.config.execution import REQUIRED
from kiloword.config.recipes import AugmentConfig
from kiloword.evaluation.command import Execution
from kiloword.models.trust import NONE, Trust

AUGMENT, AUDIT, EXECUTION = AugmentConfig(), AuditOptions(), Execution()


def embed(
    model: Positional[str],
    data: tuple[str, ...],
    out: Path,
    name: str = "teacher",
    extra_captions: tuple[str, ...] = (),
    batch: int = 64,
    workers: int | Literal["auto"] = "auto",
    device: str = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    dtype: Literal["fp16", "fp32", "int8"] = "fp16",
    trust: Annotated[Trust, arg(name="")] = NONE,
    resize: int | Literal["shortest", "squash"] | None = None,
    dim: int | None = None,
    tokens: bool = False,
    views: int = 1,
    augment: AugmentConfig = AUGMENT,
    seed: int = 0,
) -> None:
    """Precompute the features of a data set: kiloword embed runs/first/model --data photos/train --out features

    Teacher of another library: kiloword embed open_clip:ViT-B-32:weights.safetensors --data photos/train --out features

    Tokens of a frozen tower: kiloword embed efficientnet-lite0 --data photos/train --out features --tokens

    Args:
        model: model folder, open_clip:NAME:WEIGHTS or hf:FOLDER (of transformers: a CLIP, or an encoder of texts); with
            tokens, what --image-tower or --text-tower of train take, or a model folder that has such towers.
        data: tars, a table, a folder of images or scenes, as for `kiloword train`.
        out: feature store to write, for `train --features`; run the same command again after an interruption.
        name: name of the features, to tell several feature stores of a run apart.
        extra_captions: parquet tables (key, captions) whose captions are embedded too.
        batch: images in a batch.
        workers: loader processes; auto: none on a CPU, on CUDA the number of cores minus two.
        device: auto, cpu, cuda, cuda:N.
        precision: precision of the computation; recorded in the feature store.
        dtype: type of the stored features; int8, of tokens: bytes, with a minimum and a step for every 64 channels.
        trust: code that a model folder may run.
        resize: pixels of the shorter side before the centre crop, such as 256 for 224; default: as the model has it.
        dim: store the first N numbers of the features, normalised again; default: all.
        tokens: store all tokens of a tower, for `train --image-features` and `--text-features`.
        views: augmented images of each image, of which training shows one in each epoch.
        augment: augmentation of the images.
        seed: seed of the augmentation.
    """
    from kiloword.config.recipes import DataConfig
    from kiloword.data.images.views import Augmented
    from kiloword.stores import embed

    augmented = Augmented(views, augment, seed)
    options = embed.EmbedOptions(
        model=model,
        name=name,
        precision=precision,
        dtype=dtype,
        batch=batch,
        augmented=augmented,
        resize=resize,
        dim=dim,
    )
    read = DataConfig(sources=data, extra_captions=tuple(map(str, extra_captions)))
    if tokens:
        if name != "teacher" or resize is not None or dim is not None:
            raise ValueError("--name, --resize and --dim are for features, not for tokens: omit them, or --tokens.")
    elif dtype == "int8":
        raise ValueError("--dtype int8 is for tokens: add --tokens, or omit it.")
    embed.main(read, out, options, workers, device, trust, tokens)


def audit(
    data: Annotated[Positional[tuple[str, ...]], REQUIRED],
    model: str,
    out: Path = Path("audit"),
    extra_captions: tuple[str, ...] = (),
    raw_captions: bool = True,
    features: Path | None = None,
    options: Annotated[AuditOptions, arg(name="")] = AUDIT,
    execution: Annotated[Execution, arg(name="")] = EXECUTION,
) -> None:
    """Find pairs that do not match, duplicates, wrong labels: kiloword audit photos/train --model runs/first/model

    Then train without them: kiloword train siglip --data photos/train --keep audit/keep.parquet --out runs/second
    The same command resumes an interrupted audit.

    Args:
        data: tars, a table, a folder of images or scenes, as for `kiloword train`.
        model: model folder, open_clip:NAME:WEIGHTS or hf:FOLDER; it may have been trained on the same data.
        out: folder for report.html, findings.parquet, keep.parquet and audit.json.
        extra_captions: parquet tables (key, captions) whose captions are audited too.
        raw_captions: audit the images' own captions beside the extra ones.
        features: feature store of the same model for the data (`kiloword embed`), which spares encoding it; labels are
            not judged then.
        options: what is found, and what the keep-list omits.
        execution: how the model is opened and fed.
    """
    from kiloword.apps.audit.command import main

    main(data, model, out, options, execution, extra_captions, raw_captions, features)
