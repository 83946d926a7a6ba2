"""Default recipes. No torch at import, so that help texts are instant."""

from __future__ import annotations

from dataclasses import replace

from kiloword.config.recipes import AugmentConfig, DataConfig, OptimConfig, Recipe, model_of_size

MUON = OptimConfig(name="muon", muon_lr=5e-3, scale_lr=3.0)  # 4 x this muon_lr learns faster, but not shapes
TOP = replace(MUON, muon_lr=4e-2, ema=0.97)  # a small data set is soon known by heart: fast, and few steps
FIELD = OptimConfig(lr=5e-4, weight_decay=0.2, beta2=0.98, eps=1e-6)  # as CLIP for its ViTs
PHOTOS = AugmentConfig(crop=0.5, flip=0.5)
TOP_PHOTOS = replace(PHOTOS, drop_patches=0.6)  # above a frozen trunk: stored tokens are augmented by crop and flip
FEW_PHOTOS = AugmentConfig(crop=0.4, flip=0.5, jitter=0.3, drop_words=0.1)  # thousands of photos, seen dozens of times

GENTLE = 0.1  # of the learning rates of sizes debug and tiny, where trained weights are tuned (research/log.md)
TUNED = OptimConfig(lr=3e-5, weight_decay=0.1, beta2=0.98, eps=1e-6, warmup=0.02)  # arXiv:2109.01903
WHY_TUNED = (
    "the weights are trained already: large steps would undo what they can do, strong augmentation shows images that "
    "they rarely saw"
)


def default_recipe(method: str, size: str = "tiny", data: tuple[str, ...] = ("scenes",)) -> Recipe:
    """The recipe of a method, size and data, without any flags. Presets share it, so that comparisons are fair.

    Raises: ValueError for an unknown size or method.
    """
    model, captions, writes = model_of_size(size), DataConfig().captions, False
    if method:
        from kiloword.methods.registry import preset  # imports torch

        slots = preset(method)
        captions, writes = slots.captions, "text_decoder" in slots.decoders  # learns to write captions, of all patches
    drawn = all(d == "scenes" or d.startswith(("scenes:", "scenes?")) for d in data)
    exact = all(d.startswith("tree:") for d in data)  # captions whose truth is known
    small, steps, batch = size in ("debug", "tiny", "top"), 1000 if drawn else 2000, 1024
    optim, augment = FIELD, PHOTOS
    if small:
        optim, batch = MUON if drawn else replace(MUON, weight_decay=0.3, ema=0.998), 64 if drawn else 128
        augment = replace(FEW_PHOTOS, drop_words=0.0) if writes or exact else FEW_PHOTOS
    if size == "top" and not drawn:  # a small tower above a frozen one
        optim, steps, batch, augment = TOP, 150, 256, PHOTOS if writes else TOP_PHOTOS
        captions = captions if writes else "all"
    return Recipe(
        method=method,
        size=size,
        model=model,
        optim=optim,
        precision="auto",
        matmul="auto",
        data=DataConfig(sources=data, captions=captions, augment=AugmentConfig() if drawn else augment),
        steps=steps,
        batch=batch,
    )


def tuned(recipe: Recipe) -> Recipe:
    """A default recipe for weights that are trained already: small rates, short warm-up, mild augmentation.

    Of the sizes debug and tiny the rates are a share of those from scratch, of larger ones those of WiSE-FT.
    """
    small, optim, augment = recipe.size in ("debug", "tiny"), recipe.optim, recipe.data.augment
    if small:
        optim = replace(optim, lr=optim.lr * GENTLE, muon_lr=optim.muon_lr * GENTLE)
    else:
        optim = replace(TUNED, muon_lr=optim.muon_lr * GENTLE)  # if a flag chooses Muon
    if augment != AugmentConfig():
        augment = AugmentConfig(crop=0.8 if small else 0.9, flip=augment.flip)
    return replace(recipe, optim=optim, data=replace(recipe.data, augment=augment))
