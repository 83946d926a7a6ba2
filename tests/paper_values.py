"""Values that the papers state, written from their texts alone, without a look at the recipes of the package.

{recipe: {setting: (value, quotation, place)}}. A recipe may set more: what the paper leaves open.
"""

from __future__ import annotations

from typing import Any

Stated = dict[str, tuple[Any, str, str]]

LLIP: Stated = {
    "method": ("llip", "we consider the SigLIP objective", "section 3"),
    "model.image.size": (224, "we crop and resize images to 224", "section 4"),
    "settings.heads": (8, "we fix M = 8 the number of heads in the cross-attention", "section 4"),
    "settings.temperature": (5.0, "the cross-attention's temperature tau = 5", "section 4"),
    "optim.name": ("adamw", "We pre-train our models with the AdamW optimizer", "section 4"),
    "optim.beta2": (0.95, "with beta2 = 0.95 as done by Zhai et al. (2023)", "section 4"),
    "batch": (32768, "with a batch size of 32,768", "section 4"),
    "samples": (12_800_000_000, "a total amount of 12.8B pairs of image-text seen", "section 4"),
}


def llip(patch: int, k: int, place: str) -> Stated:
    """Llip at one size: the patch, and the number of mixture tokens."""
    return LLIP | {"model.image.patch": (patch, f"ViT-*/{patch}", "section 4"), "settings.k": (k, f"Llip{k}", place)}


PROLIP: Stated = {
    "method": ("prolip", "Probabilistic Language-Image Pre-training", "title"),
    "model.image.patch": (16, "We use ViT-B/16 as our image encoder", "section 4.1"),
    "model.text.depth": (12, "a 12-layer 768-wide Transformer", "section 4.1"),
    "model.text.width": (768, "a 12-layer 768-wide Transformer", "section 4.1"),
    "model.head.dim": (768, "We set the embedding dimension to 768", "section 4.1"),
    "model.text.context": (64, "the context length to 64 tokens", "section 4.1"),
    "settings.log_var": (-10.0, "We initialize the bias value of the linear projection", "section 4.1"),
    "settings.scale": (10.0, "We set the initial scale and bias parameters", "section 4.1"),
    "settings.bias": (-10.0, "We set the initial scale and bias parameters", "section 4.1"),
    "settings.c": (1000.0, "If not specified, we simply chose", "appendix B.1"),
    "settings.eps": (-20.0, "If not specified, we simply chose", "appendix B.1"),
    "settings.image_in_text": (1e-7, "in Equation 6 as 10^-7 and 0.001, respectively", "appendix B.1"),
    "settings.masked": (1e-3, "in Equation 6 as 10^-7 and 0.001, respectively", "appendix B.1"),
    "settings.masked_every": (8, "We randomly select 12.5% image-text pairs from the mini-batch", "section 4.1"),
    "settings.drop_patches": (0.75, "we mask out 75% of the input tokens", "section 3.3"),
    "settings.mask_words": (0.75, "we mask out 75% of the input tokens", "section 3.3"),
    "settings.hide_words": ("mask", "for image, we drop the input patch tokens", "section 3.3"),
    "optim.name": ("adamw", "following the official openclip implementation", "appendix B.1"),
    "optim.lr": (5e-4, "We use learning rate of 0.0005", "appendix B.1"),
    "optim.beta1": (0.9, "beta1 of 0.9, beta2 of 0.95", "appendix B.1"),
    "optim.beta2": (0.95, "beta1 of 0.9, beta2 of 0.95", "appendix B.1"),
    "optim.weight_decay": (0.2, "weight decay of 0.2", "appendix B.1"),
    "optim.warmup": (10_000, "We apply 10000 warmup steps", "appendix B.1"),
    "batch": (16384, "the full batch size is 512 x 32 = 16384", "appendix B.1"),
    "data.augment.crop": (0.8, "image augmentations of scaling 0.8 to 1.0", "appendix B.1"),
    "precision": ("bf16", "using 32 NVIDIA H100 GPUs with Bfloat16 precision", "section 4.1"),
}

SYCOCA: Stated = {
    "method": ("sycoca", "we pretrain SyCoCa with all these losses combined", "section 3.4"),
    "epochs": (20, "for a total of 20 epochs", "section 4.1"),
    "batch": (2048, "The batch size during training is set to 2048", "section 4.1"),
    "model.image.size": (224, "the resolution of pretraining images is set to 224", "section 4.1"),
    "optim.name": ("adamw", "We use the AdamW optimizer", "section 4.1"),
    "optim.lr": (1e-4, "initial learning rate of 1e-4", "section 4.1"),
    "optim.warmup": (5000, "cosine decay, including a warm-up period of 5000 steps", "section 4.1"),
    "settings.caption_weight": (2.0, "2 following CoCa", "section 4.1"),
    "settings.mim_weight": (1.0, "for training our model", "section 4.1"),
    "settings.caption_share": (0.5, "are both empirically set to 50%", "section 4.1"),
    "settings.mim_share": (0.5, "are both empirically set to 50%", "section 4.1"),
    "settings.caption_mask": ("attentive", "the patches with the lowest scores", "section 3.3"),
    "settings.mim_mask": ("attentive", "of top scoring patches", "section 3.3"),
    "settings.guide": ("text", "Text-Guided Masked Image Modeling", "section 3.2"),
    "settings.similar_to": ("tokens", "the token-wise maximum similarity between image and text", "section 3.3"),
}

FFF: Stated = {
    "method": ("fff", "Fixing Flawed Foundations", "title"),
    "optim.name": ("adamw", "specifically, using AdamW", "section 5"),
    "optim.lr": (1e-3, "learning rate of 1e-3", "section 5"),
    "optim.weight_decay": (0.1, "weight decay of 0.1", "section 5"),
    "model.image.size": (224, "randomly resizing and cropping the image to 224", "section 5"),
    "model.text.context": (77, "the data is truncated to 77 tokens", "section 5"),
    "data.augment.blur_sigma": ((0.1, 2.0), "random Gaussian blur (between 0.1 and 2.0)", "section 5"),
    "data.augment.jitter_strength": ((0.4, 0.4, 0.4, 0.1), "color jittering (0.4, 0.4, 0.4, 0.1)", "section 5"),
    "data.captions": ("all", "original caption plus pseudo-captions", "section 4.3"),
    "settings.p1": (0.27, "The thresholds were set to", "section 5"),
    "settings.p2": (0.92, "The thresholds were set to", "section 5"),
    "settings.p3": (0.99, "The thresholds were set to", "section 5"),
    "settings.p1_text": (0.24, "The thresholds were set to", "section 5"),
    "settings.image_text": (True, "we define the assignment matrix", "section 4.1, equation 2"),
    "settings.image_image": (True, "we define the assignment matrix", "section 4.1, equation 2"),
    "settings.text_text": (True, "we define the assignment matrix", "section 4.1, equation 2"),
    "batch": (8096, "32 epochs with a batch size of 8,096", "section 5"),
    "epochs": (32, "the models are trained for 32 epochs", "section 5"),
}
B32: Stated = {"model.image.patch": (32, "ViT-B/32", "table 1")}
CC3M: Stated = {"optim.weight_decay": (0.5, "except for CC3M where we set the weight decay to 0.5", "section 5")}

CLIP_C: Stated = {
    "method": ("clip-c", "CLIP-C", "abstract"),
    "optim.name": ("adamw", "Hyper-parameters. AdamW", "experimental set-up"),
    "settings.merge": (" and ", "string concatenation function with the word 'and' as a conjunction", "method"),
    "settings.partner": ("random", "index is taken with respect to the dataset size", "method"),
    "settings.parts": ("both", "blends 50% of each image", "abstract"),
    "settings.crop": ("centre", "center half crops spanning either the height or the width", "method"),
    "model.image.patch": (16, "ViT-S/16 and ViT-B/16", "zero-shot results"),
}

RESNET: Stated = {"size": ("rn50", "ResNet-50 model pre-trained on CC3M/CC12M", "table 3")}
MANY: Stated = {"samples": (1_280_000_000, "ViT-B/16 model with 1.28B seen samples", "table 1")}

VALUES: dict[str, Stated] = {
    "llip-b32": llip(32, 64, "table 1"),
    "llip-b16": llip(16, 64, "table 1"),
    "llip-l14": llip(14, 32, "table 1"),
    "llip-h14": llip(14, 64, "table 1"),
    "llip-g14": llip(14, 64, "table 1"),
    "siglip-llip-b32": {
        **{name: LLIP[name] for name in ("model.image.size", "optim.name", "optim.beta2", "batch", "samples")},
        "method": ("siglip", "We reproduce SigLIP pre-training with our setup", "section 5"),
        "model.image.patch": (32, "ViT-B/32", "section 5"),
        "settings.bias": (-10.0, "the additional bias is -10 as in SigLIP", "appendix A"),
    },
    "prolip-b16-1.28b": PROLIP | MANY,
    "prolip-b16-12.8b": PROLIP | {"samples": (12_800_000_000, "with 12.8 billion seen samples", "section 4.2")},
    "prolip-b16-adamp": PROLIP
    | MANY
    | {"optim.name": ("adamp", "denotes a model optimized by the AdamP", "table C.1")},
    "prolip-b16-recommended": PROLIP
    | MANY
    | {
        "settings.c": (10.0, "-10 10 67.8 55.3 58.5", "table C.5"),
        "settings.eps": (-10.0, "which empirically performs the best (57.3 vs. 57.9", "appendix B.1"),
    },
    "prolip-96m": {"samples": (96_000_000, "datasets with 96M seen samples", "appendix C.2")},
    "sycoca-cc12m": SYCOCA,
    "coca-cc12m": {
        **{name: SYCOCA[name] for name in ("epochs", "batch", "optim.name", "optim.lr", "optim.warmup")},
        "method": ("coca", "using the open-source implementation of CoCa", "section 4.1"),
        "settings.caption_weight": SYCOCA["settings.caption_weight"],
    },
    "fff-cc3m": FFF | CC3M | RESNET,
    "fff-cc12m": FFF | RESNET,
    "fff-cc3m-b16": FFF | CC3M | {"model.image.patch": (16, "using a ViT-B/16 model pretrained on CC3M", "section 6")},
    "fff-yfcc15m": FFF | B32,
    "fff-open30m": FFF | B32,
    "fff-open70m": FFF | B32,
    **dict.fromkeys(("clip-c-cc3m", "clip-c-cc3m-b16", "clip-c-cc12m", "clip-c-redcaps"), CLIP_C),
}
