"""Released weights of Llip and ProLIP: our models of them are the public code's forward pass, written out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

import kiloword
from commands import refused
from folders import changed
from kiloword.api import load
from kiloword.cli.main import main
from kiloword.config.recipes import sizes
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import load_model, read_model_file
from other_libraries import word_vocabulary

State = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


def block_shapes(tower: str, width: int, hidden: int, layers: int = 2) -> Shapes:
    """Of the residual attention blocks of a tower. Args: hidden: width inside the MLPs."""
    parts = {"attn.in_proj_": (3 * width, width), "attn.out_proj.": (width, width)}
    parts |= {"mlp.c_fc.": (hidden, width), "mlp.c_proj.": (width, hidden)}
    shapes: Shapes = {}
    for block in (f"{tower}transformer.resblocks.{n}" for n in range(layers)):
        shapes |= {f"{block}.{name}weight": shape for name, shape in parts.items()}
        shapes |= {f"{block}.{name}bias": shape[:1] for name, shape in parts.items()}
        shapes |= norm_shapes(f"{block}.ln_1", f"{block}.ln_2", width=width)
    return shapes


def norm_shapes(*names: str, width: int) -> Shapes:
    return {f"{name}.{part}": (width,) for name in names for part in ("weight", "bias")}


def drawn(shapes: Mapping[str, tuple[int, ...]], spread: float) -> State:
    """Random weights, off the values (0 and 1) where an error would not show."""
    generator = torch.Generator().manual_seed(0)
    state = {name: spread * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {n: x + 1 if ("ln_" in n or "norm" in n) and n.endswith("weight") else x for n, x in state.items()}


def norm(state: State, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    """A layer norm where the weights have one."""
    if f"{name}.bias" not in state:
        return x
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}weight"], state[f"{name}bias"])


def blocks(
    state: State, tower: str, x: Tensor, activation: Callable[[Tensor], Tensor], causal: bool = False, eps: float = 1e-5
) -> Tensor:
    """The residual attention blocks of two heads: [N, L, W]."""
    prefix = f"{tower}transformer.resblocks."
    for n in sorted({int(name.removeprefix(prefix).partition(".")[0]) for name in state if name.startswith(prefix)}):
        block = f"{prefix}{n}"
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in linear(state, f"{block}.attn.in_proj_", norm(state, f"{block}.ln_1", x, eps)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
        x = x + linear(state, f"{block}.attn.out_proj.", seen)
        hidden = linear(state, f"{block}.mlp.c_fc.", norm(state, f"{block}.ln_2", x, eps))
        x = x + linear(state, f"{block}.mlp.c_proj.", activation(hidden))
    return x


# Llip

K, WIDTH, DIM, PATCHES, CONTEXT = 3, 32, 16, 4, 77  # WIDTH of both towers
RECIPE = """
base = "llip-b16-released"
size = "debug"
settings.heads = 2
[model.image]
activation = "quick_gelu"
[model.text]
activation = "quick_gelu"
context = 77
vocab = 49408
"""


def llip_weights(norms: bool, every: bool) -> State:
    """Args: every: a projection per patch, too."""
    matrices = K + PATCHES * every
    shapes = {
        "logit_scale": (),
        "logit_bias": (),
        "visual.conv1.weight": (WIDTH, 3, 16, 16),
        "visual.class_embedding": (K, WIDTH),
        "visual.positional_embedding": (K + PATCHES, WIDTH),
        "token_embedding.weight": (49408, WIDTH),
        "positional_embedding": (CONTEXT, WIDTH),
        "text_projection": (WIDTH, DIM),
        "k_proj": (matrices, WIDTH, DIM),
        "v_proj": (matrices, WIDTH, DIM),
        "q_proj": (WIDTH, DIM),
        "pred.out_proj": (DIM, DIM),
        **norm_shapes("visual.ln_pre", "visual.ln_post", "ln_final", width=WIDTH),
        **(norm_shapes("K_norm", "Q_norm", "V_norm", width=DIM) if norms else {}),
        **block_shapes("visual.", WIDTH, 2 * WIDTH),
        **block_shapes("", WIDTH, 2 * WIDTH),
    }
    return drawn(shapes, 0.3)


def quick_gelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


def llip_scores(state: State, pixels: Tensor, ids: Tensor, every: bool) -> Tensor:
    """[I, T] of normalised images [I, 3, H, W] and padded texts [T, CONTEXT], whose end is the highest id."""
    x = F.conv2d(pixels, state["visual.conv1.weight"], stride=16).flatten(2).transpose(1, 2)
    x = torch.cat([state["visual.class_embedding"].expand(len(x), -1, -1), x], 1) + state["visual.positional_embedding"]
    x = norm(state, "visual.ln_post", blocks(state, "visual.", norm(state, "visual.ln_pre", x), quick_gelu))
    h = x if every else x[:, :K]
    y = state["token_embedding.weight"][ids] + state["positional_embedding"]
    g = norm(state, "ln_final", blocks(state, "", y, quick_gelu, causal=True))[torch.arange(len(ids)), ids.argmax(1)]
    key, value, query = (
        norm(state, f"{side}_norm", projected).unflatten(-1, (2, -1))
        for side, projected in (
            ("K", torch.einsum("inw,nwd->ind", h, state["k_proj"])),
            ("V", torch.einsum("inw,nwd->ind", h, state["v_proj"])),
            ("Q", g @ state["q_proj"]),
        )
    )
    shares = (torch.einsum("inmd,tmd->itmn", key, query) / 5).softmax(-1)
    mixed = torch.einsum("itmn,inmd->itmd", shares, value).flatten(2) @ state["pred.out_proj"]
    return F.cosine_similarity(mixed, (g @ state["text_projection"])[None], dim=-1)


@pytest.mark.parametrize(("norms", "every"), [(False, False), (True, False), (True, True)])
def test_our_llip_is_their_forward_pass(tmp_path: Path, norms: bool, every: bool) -> None:
    state = llip_weights(norms, every)
    (tmp_path / "small.toml").write_text(RECIPE)
    torch.save({"epoch": 1, "state_dict": {f"module.{n}": x for n, x in state.items()}}, tmp_path / "w.pt")
    words = ["import", "llip", str(tmp_path / "small.toml"), str(tmp_path / "w.pt"), "--out", str(tmp_path / "out")]
    main(words)
    ours, texts = kiloword.load(tmp_path / "out"), ["a red dog", "two cats on the grass", ""]
    pixels = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    padded = torch.zeros(len(texts), CONTEXT, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids = ours.tokenizer.encode([text], ours.model.config.text).ids
        padded[row, : len(ids)] = ids
    expected = llip_scores(state, ours.model.normalise(pixels), padded, every)
    assert expected.std() > 0.05
    torch.testing.assert_close(ours.score(pixels, texts), expected, rtol=0, atol=1e-5)
    for name, value in (("log_scale", state["logit_scale"]), ("bias", state["logit_bias"])):
        assert float(getattr(ours.model.head, name).detach()) == pytest.approx(float(value))


def test_weights_and_recipes_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.toml").write_text(RECIPE)
    good = llip_weights(norms=False, every=False)
    lacking = {name: value for name, value in good.items() if name != "q_proj"}
    for recipe, state, word in (
        (tmp_path / "small.toml", lacking, "query"),
        (tmp_path / "small.toml", {"a": good["q_proj"]}, "visual.class_embedding"),
        ("llip-b16-released", good, "llip-b16-released"),
        ("clip-cc3m", good, "llip"),
    ):
        torch.save(state, tmp_path / "w.pt")
        assert word in refused(capsys, "import", "llip", recipe, tmp_path / "w.pt", "--out", tmp_path / "out")
        assert not (tmp_path / "out").exists()


# ProLIP: of the form of the released ViT-B/16, but smaller

WORDS = ("a", "red", "dog", "on", "the", "grass")
CAPTIONS = ["A red dog!", "the grass", "a dog on the red grass on the grass", ""]
SIZE, PATCH, WIDE, LENGTH = 32, 8, 128, 9  # WIDE: both towers and the embedding; LENGTH: of texts
VISION = {"image_size": SIZE, "layers": 2, "width": WIDE, "patch_size": PATCH, "embed_unc": True, "init_unc_bias": -10}
TEXT = {"context_length": LENGTH, "vocab_size": 40, "width": WIDE, "heads": 2, "layers": 2, "no_causal_mask": True}
TEXT |= {"proj_bias": True, "pool_type": "last", "embed_cls": True, "embed_unc": True, "init_unc_bias": -10}
TEXT |= {"norm_kwargs": {"eps": 1e-6}, "tokenizer_kwargs": {"clean": "canonicalize"}}  # type: ignore[dict-item]
# The config.json that is published with the weights
PUBLISHED = {"embed_dim": WIDE, "init_logit_bias": -10, "vision_cfg": VISION, "text_cfg": TEXT}


def prolip_weights(vocab: int = 40) -> State:
    projections = ("visual.uncertainty_proj", "text.text_projection", "text.text_uncertainty_projection")
    shapes = {
        "visual.conv1.weight": (WIDE, 3, PATCH, PATCH),
        "visual.class_embedding": (WIDE,),
        "visual.unc_embedding": (WIDE,),
        "visual.positional_embedding": ((SIZE // PATCH) ** 2 + 2, WIDE),
        "visual.proj": (WIDE, WIDE),
        "text.token_embedding.weight": (vocab, WIDE),
        "text.cls_emb": (WIDE,),
        "text.unc_emb": (WIDE,),
        "text.positional_embedding": (LENGTH + 2, WIDE),
        **{f"{name}.weight": (WIDE, WIDE) for name in projections},
        **{f"{name}.bias": (WIDE,) for name in projections},
        **norm_shapes("visual.ln_pre", "visual.ln_post", "text.ln_final", width=WIDE),
        **block_shapes("visual.", WIDE, 4 * WIDE),
        **block_shapes("text.", WIDE, 4 * WIDE),
    }
    state = drawn(shapes, 0.07) | {"logit_scale": torch.tensor(2.5), "logit_bias": torch.tensor(-9.0)}
    for name in ("visual.uncertainty_proj.bias", "text.text_uncertainty_projection.bias"):
        state[name] = state[name] - 5
    for name in ("visual.unc_embedding", "visual.positional_embedding"):
        state[name] = (1024 * state[name]).round() / 1024  # so that their sum is exact in single precision
    return state


def of_images(state: State, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log variance [I, D] of normalised images [I, 3, H, W]."""
    x = F.conv2d(pixels, state["visual.conv1.weight"], stride=PATCH).flatten(2).transpose(1, 2)
    first = [state[name].expand(len(x), 1, -1) for name in ("visual.class_embedding", "visual.unc_embedding")]
    x = torch.cat([*first, x], 1) + state["visual.positional_embedding"]
    x = blocks(state, "visual.", norm(state, "visual.ln_pre", x), F.gelu)
    x = norm(state, "visual.ln_post", x)
    mean = norm(state, "visual.ln_post", x[:, 0]) @ state["visual.proj"]  # the class token: twice
    return F.normalize(mean, dim=-1), linear(state, "visual.uncertainty_proj.", x[:, 1])


def of_texts(state: State, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log variance [T, D] of padded texts [T, context]."""
    x = F.embedding(ids, state["text.token_embedding.weight"])
    last = [state[name].expand(len(x), 1, -1) for name in ("text.unc_emb", "text.cls_emb")]
    x = blocks(state, "text.", torch.cat([x, *last], 1) + state["text.positional_embedding"], F.gelu, eps=1e-6)
    mean = linear(state, "text.text_projection.", norm(state, "text.ln_final", x[:, -1], 1e-6))
    log_var = linear(state, "text.text_uncertainty_projection.", mean)  # of the mean, not of the uncertainty token
    return F.normalize(mean, dim=-1), log_var


def ppcl_logits(state: State, images: tuple[Tensor, Tensor], texts: tuple[Tensor, Tensor]) -> Tensor:
    """[I, T], every pair's variances summed in the open."""
    both = images[1].exp()[:, None] + texts[1].exp()[None]
    return state["logit_scale"].exp() * (images[0] @ texts[0].T - both.sum(-1) / 2) + state["logit_bias"]


def published(folder: Path, state: State, vocab: int = 40) -> Path:
    """What is published: weights, config and SigLIP's tokenizer, whose end and pad are 1. Returns: the weights."""
    word_vocabulary(folder, WORDS)
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    changed(folder, "config.json", text_cfg__vocab_size=vocab)
    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors"


@torch.no_grad()
def compare(state: State, folder: Path, dtype: str, tolerance: float) -> None:
    model, tokenizer = load_model(folder, dtype=dtype)
    model.eval()
    state = {name: value.to(next(model.parameters()).dtype) for name, value in state.items()}
    generator = torch.Generator().manual_seed(1)
    photos = torch.randint(0, 256, (3, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    padded = torch.ones(len(CAPTIONS), LENGTH, dtype=torch.int64)  # pads and the end are 1
    for row, caption in enumerate(CAPTIONS):
        words = caption.lower().replace("!", "").split()[: LENGTH - 1]
        padded[row, : len(words)] = torch.tensor([3 + WORDS.index(word) for word in words], dtype=torch.int64)
    images = model.encode_image(photos)[1]
    captions = model.encode_text(tokenizer.encode(CAPTIONS, model.config.text))[1]
    theirs = of_images(state, model.normalise(photos)), of_texts(state, padded)
    for ours, (mean, log_var) in zip((images, captions), theirs, strict=True):
        assert (ours["vec"] - mean).abs().max() < tolerance
        assert (ours["log_var"] - log_var).abs().max() < tolerance
    logits = ppcl_logits(state, *theirs)
    assert (model.head.logits(model.score(images, captions)) - logits).abs().max() < tolerance * logits.abs().max()
    assert logits.std() > 100 * tolerance  # so that an error would show


def test_our_prolip_is_their_forward_pass(tmp_path: Path) -> None:
    state = prolip_weights()
    main(["import", "prolip", str(published(tmp_path / "hub", state)), "--out", str(tmp_path / "ours")])
    compare(state, tmp_path / "ours", "fp32", 1e-5)
    compare(state, tmp_path / "ours", "fp64", 1e-10)
    file = read_model_file(tmp_path / "ours")
    assert (file.method, file.model.text.causal) == ("prolip-released", False)
    matcher = load(tmp_path / "ours")
    ids = matcher.tokenizer.encode(["a red dog"], matcher.model.config.text).ids.tolist()
    assert ids == [3, 4, 5, 1, 1, 1, 1, 1, 1, matcher.tokenizer.roles.unc, matcher.tokenizer.roles.cls]


def test_a_vocabulary_without_special_tokens_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the real one does: 32100 tokens of which none is the mask, [UNC] or [CLS]."""
    vocab = 3 + len(WORDS)
    state = prolip_weights(vocab)
    path = published(tmp_path / "hub", {**state, "ts_mean.weight": torch.ones(1)}, vocab)
    main(["import", "prolip", str(path), "--out", str(tmp_path / "ours")])
    assert "left over: ts_mean.weight" in capsys.readouterr().out
    compare(state, tmp_path / "ours", "fp64", 1e-10)


POSITIONS, BIAS = "visual.positional_embedding", "text.text_projection.bias"
UNFIT: list[tuple[Callable[[State], State], dict[str, Any], str]] = [  # changes of weights and config.json
    (lambda good: {k: v for k, v in good.items() if "cls_emb" not in k}, {}, "text.cls_emb"),
    (lambda good: {k: v for k, v in good.items() if "uncertainty_proj" not in k}, {}, "head.uncertainty.image_log_var"),
    (lambda good: {**good, POSITIONS: good[POSITIONS][1:].clone()}, {}, "positions is [16, 128] instead of [17, 128]"),
    (lambda good: {**good, BIAS: torch.zeros(127)}, {}, "head.pooling.text_projection.bias is [127]"),
    (dict, {"text_cfg__embed_unc": False}, "text_cfg.embed_unc"),
    (dict, {"vision_cfg__timm_model_name": "vit"}, "vision_cfg.timm_model_name"),
    (dict, {"text_cfg__vocab_size": 49408}, "padded"),
]


@pytest.mark.parametrize(("change", "config", "word"), UNFIT)
def test_what_does_not_fit_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[State], State],
    config: dict[str, Any],
    word: str,
) -> None:
    path = published(tmp_path / "hub", change(prolip_weights()))
    changed(path.parent, "config.json", **config)
    assert word in refused(capsys, "import", "prolip", path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_lies_beside_the_weights_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = published(tmp_path / "hub", prolip_weights())
    for name in ("tokenizer.json", "config.json"):
        (path.parent / name).unlink()
        assert name in refused(capsys, "import", "prolip", path, "--out", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_released_settings_are_the_code_s() -> None:
    """Where they differ from those of `prolip`."""
    method = preset("prolip-released")
    made = build(sizes()["debug"], method, 0)
    assert float(made.head.log_scale.detach().exp()) == pytest.approx(1 / 0.07)
    for name in ("vib_image", "masked_image", "image_in_text"):
        said = method.terms[name][1](made.config).settings
        assert (said.vib_form, said.drop_patches, said.c, said.eps) == ("released", 0.25, 1000.0, -10.0)
