"""Released ProLIP weights: our model of them is the public code's forward pass, transcribed here from its names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

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
WORDS = ("a", "red", "dog", "on", "the", "grass")
CAPTIONS = ["A red dog!", "the grass", "a dog on the red grass on the grass", ""]


@dataclass(frozen=True)
class Shape:
    """Of a released model, of its ViT-B/16's form but smaller."""

    dim: int = 128
    size: int = 32
    patch: int = 8
    width: int = 128
    layers: int = 2
    context: int = 9
    vocab: int = 40

    @property
    def heads(self) -> int:
        return self.width // 64

    def config(self) -> dict[str, Any]:
        """The config.json that is published with the weights."""
        vision = {"image_size": self.size, "layers": self.layers, "width": self.width, "patch_size": self.patch}
        text: dict[str, Any] = {
            "context_length": self.context,
            "vocab_size": self.vocab,
            "width": self.width,
            "heads": self.heads,
        }
        text |= {"layers": self.layers, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
        text |= {"embed_cls": True, "norm_kwargs": {"eps": 1e-6}, "tokenizer_kwargs": {"clean": "canonicalize"}}
        unc = {"embed_unc": True, "init_unc_bias": -10}
        return {"embed_dim": self.dim, "init_logit_bias": -10, "vision_cfg": vision | unc, "text_cfg": text | unc}

    def shapes(self) -> dict[str, list[int]]:
        """Names and shapes of the weights."""
        w, d, p = self.width, self.dim, self.patch
        whole = {
            "logit_scale": [],
            "logit_bias": [],
            "visual.conv1.weight": [w, 3, p, p],
            "visual.class_embedding": [w],
            "visual.unc_embedding": [w],
            "visual.positional_embedding": [(self.size // p) ** 2 + 2, w],
            "visual.proj": [w, d],
            "visual.uncertainty_proj.weight": [d, w],
            "visual.uncertainty_proj.bias": [d],
            "text.token_embedding.weight": [self.vocab, w],
            "text.cls_emb": [w],
            "text.unc_emb": [w],
            "text.positional_embedding": [self.context + 2, w],
            "text.text_projection.weight": [d, w],
            "text.text_projection.bias": [d],
            "text.text_uncertainty_projection.weight": [d, w],
            "text.text_uncertainty_projection.bias": [d],
        }
        norms = ["visual.ln_pre", "visual.ln_post", "text.ln_final"]
        for tower in ("visual", "text"):
            for n in range(self.layers):
                block = f"{tower}.transformer.resblocks.{n}"
                norms += [f"{block}.ln_1", f"{block}.ln_2"]
                whole |= {f"{block}.attn.in_proj_weight": [3 * w, w], f"{block}.attn.in_proj_bias": [3 * w]}
                whole |= {f"{block}.attn.out_proj.weight": [w, w], f"{block}.attn.out_proj.bias": [w]}
                whole |= {f"{block}.mlp.c_fc.weight": [4 * w, w], f"{block}.mlp.c_fc.bias": [4 * w]}
                whole |= {f"{block}.mlp.c_proj.weight": [w, 4 * w], f"{block}.mlp.c_proj.bias": [w]}
        return whole | {f"{norm}.{part}": [w] for norm in norms for part in ("weight", "bias")}

    def weights(self) -> State:
        """Random, and off the values (0 and 1) where an error would not show."""
        generator = torch.Generator().manual_seed(0)
        state = {}
        for name, shape in self.shapes().items():
            noise = torch.randn(shape, generator=generator)
            state[name] = noise * (shape[-1] if len(shape) > 1 else 400) ** -0.5
            if "ln_" in name and name.endswith("weight"):
                state[name] += 1
        state["visual.proj"] = torch.randn(self.width, self.dim, generator=generator) * self.width**-0.5
        state["logit_scale"], state["logit_bias"] = torch.tensor(2.5), torch.tensor(-9.0)
        for name in ("visual.uncertainty_proj.bias", "text.text_uncertainty_projection.bias"):
            state[name] = state[name] - 5
        for name in ("visual.unc_embedding", "visual.positional_embedding"):
            state[name] = (1024 * state[name]).round() / 1024  # so that their sum is exact in single precision
        return state


SMALL = Shape()


def norm(state: State, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)


def blocks(state: State, tower: str, x: Tensor, shape: Shape, eps: float) -> Tensor:
    """The residual attention blocks, all tokens seeing all: [N, L, W]."""
    for n in range(shape.layers):
        block = f"{tower}.transformer.resblocks.{n}"
        q, k, v = F.linear(
            norm(state, f"{block}.ln_1", x, eps),
            state[f"{block}.attn.in_proj_weight"],
            state[f"{block}.attn.in_proj_bias"],
        ).chunk(3, -1)
        mixed = []
        for head in range(shape.heads):
            one = slice(64 * head, 64 * head + 64)
            weights = (q[..., one] @ k[..., one].transpose(1, 2) / 8).softmax(-1)
            mixed.append(weights @ v[..., one])
        x = x + F.linear(
            torch.cat(mixed, -1), state[f"{block}.attn.out_proj.weight"], state[f"{block}.attn.out_proj.bias"]
        )
        hidden = F.linear(
            norm(state, f"{block}.ln_2", x, eps), state[f"{block}.mlp.c_fc.weight"], state[f"{block}.mlp.c_fc.bias"]
        )
        x = x + F.linear(F.gelu(hidden), state[f"{block}.mlp.c_proj.weight"], state[f"{block}.mlp.c_proj.bias"])
    return x


def of_images(state: State, pixels: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Mean and log variance [I, D] of normalised images [I, 3, H, W]."""
    x = F.conv2d(pixels, state["visual.conv1.weight"], stride=shape.patch).flatten(2).transpose(1, 2)
    first = [state[name].expand(len(x), 1, -1) for name in ("visual.class_embedding", "visual.unc_embedding")]
    x = torch.cat([*first, x], 1) + state["visual.positional_embedding"]
    x = blocks(state, "visual", norm(state, "visual.ln_pre", x, 1e-5), shape, 1e-5)
    x = norm(state, "visual.ln_post", x, 1e-5)
    mean = norm(state, "visual.ln_post", x[:, 0], 1e-5) @ state["visual.proj"]  # the class token: twice
    log_var = F.linear(x[:, 1], state["visual.uncertainty_proj.weight"], state["visual.uncertainty_proj.bias"])
    return F.normalize(mean, dim=-1), log_var


def of_texts(state: State, ids: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Mean and log variance [T, D] of padded texts [T, context]."""
    x = F.embedding(ids, state["text.token_embedding.weight"])
    last = [state[name].expand(len(x), 1, -1) for name in ("text.unc_emb", "text.cls_emb")]
    x = blocks(state, "text", torch.cat([x, *last], 1) + state["text.positional_embedding"], shape, 1e-6)
    mean = norm(state, "text.ln_final", x[:, -1], 1e-6)
    mean = F.linear(mean, state["text.text_projection.weight"], state["text.text_projection.bias"])
    log_var = F.linear(  # of the mean, not of the uncertainty token
        mean, state["text.text_uncertainty_projection.weight"], state["text.text_uncertainty_projection.bias"]
    )
    return F.normalize(mean, dim=-1), log_var


def ppcl_logits(state: State, images: tuple[Tensor, Tensor], texts: tuple[Tensor, Tensor]) -> Tensor:
    """[I, T], every pair's variances summed in the open."""
    both = images[1].exp()[:, None] + texts[1].exp()[None]
    return state["logit_scale"].exp() * (images[0] @ texts[0].T - both.sum(-1) / 2) + state["logit_bias"]


def write(folder: Path, shape: Shape, state: State) -> Path:
    """What is published: weights, config and SigLIP's tokenizer, whose end and pad are 1."""
    word_vocabulary(folder, WORDS)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors"


def bring(path: Path, out: Path) -> None:
    main(["import", "prolip", str(path), "--out", str(out)])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[State, Path]:
    """Weights, and the model folder made of them."""
    folder = tmp_path_factory.mktemp("released")
    state = SMALL.weights()
    bring(write(folder / "hub", SMALL, state), folder / "ours")
    return state, folder / "ours"


@torch.no_grad()
def compare(shape: Shape, state: State, folder: Path, dtype: str, tolerance: float) -> None:
    model, tokenizer = load_model(folder, dtype=dtype)
    model.eval()
    state = {name: value.to(next(model.parameters()).dtype) for name, value in state.items()}
    generator = torch.Generator().manual_seed(1)
    photos = torch.randint(0, 256, (3, 3, shape.size, shape.size), dtype=torch.uint8, generator=generator)
    padded = torch.ones(len(CAPTIONS), shape.context, dtype=torch.int64)  # pads and the end are 1
    for row, caption in enumerate(CAPTIONS):
        words = caption.lower().replace("!", "").split()[: shape.context - 1]
        padded[row, : len(words)] = torch.tensor([3 + WORDS.index(word) for word in words], dtype=torch.int64)
    images = model.encode_image(photos)[1]
    captions = model.encode_text(tokenizer.encode(CAPTIONS, model.config.text))[1]
    theirs = of_images(state, model.normalise(photos), shape), of_texts(state, padded, shape)
    for ours, (mean, log_var) in zip((images, captions), theirs, strict=True):
        assert (ours["vec"] - mean).abs().max() < tolerance
        assert (ours["log_var"] - log_var).abs().max() < tolerance
    logits = ppcl_logits(state, *theirs)
    assert (model.head.logits(model.score(images, captions)) - logits).abs().max() < tolerance * logits.abs().max()
    assert logits.std() > 100 * tolerance  # so that an error would show


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("fp64", 1e-10)])
def test_our_model_is_their_forward_pass(small: tuple[State, Path], dtype: str, tolerance: float) -> None:
    compare(SMALL, *small, dtype, tolerance)


@pytest.mark.parametrize("changed", ["visual.ln_post.weight", "visual.unc_embedding", "text.unc_emb", "text.cls_emb"])
def test_each_of_their_quirks_counts(small: tuple[State, Path], changed: str) -> None:
    state = {
        **small[0],
        changed: small[0][changed] + 0.5 * torch.randn(128, generator=torch.Generator().manual_seed(2)),
    }
    with pytest.raises(AssertionError):
        compare(SMALL, state, small[1], "fp64", 1e-3)


def test_what_the_folder_says(small: tuple[State, Path]) -> None:
    file = read_model_file(small[1])
    assert file.method == "prolip-released"
    assert (file.model.text.context, file.model.text.extra_tokens) == (11, ("unc", "cls"))
    assert not file.model.text.causal
    assert file.model.text.pad_to_context
    matcher = load(small[1])
    ids = matcher.tokenizer.encode(["a red dog"], matcher.model.config.text).ids.tolist()
    assert ids == [3, 4, 5, 1, 1, 1, 1, 1, 1, matcher.tokenizer.roles.unc, matcher.tokenizer.roles.cls]
    assert matcher.encode_text(["a red dog"])["log_var"].shape == (1, 128)


def test_a_vocabulary_without_special_tokens_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the real one does: 32100 tokens of which none is the mask, [UNC] or [CLS]."""
    shape = Shape(layers=1, vocab=3 + len(WORDS))
    state = shape.weights()
    bring(write(tmp_path / "hub", shape, {**state, "ts_mean.weight": torch.ones(1)}), tmp_path / "ours")
    said = capsys.readouterr().out
    assert "left over: ts_mean.weight" in said
    compare(shape, state, tmp_path / "ours", "fp64", 1e-10)


def said(capsys: pytest.CaptureFixture[str], path: Path, out: Path) -> str:
    message = refused(capsys, "import", "prolip", path, "--out", out)
    assert not out.exists()
    return message


POSITIONS, BIAS = "visual.positional_embedding", "text.text_projection.bias"
LACKING: list[tuple[Callable[[State], State], str]] = [
    (lambda good: {k: v for k, v in good.items() if "cls_emb" not in k}, "text.cls_emb"),
    (lambda good: {k: v for k, v in good.items() if "uncertainty_proj" not in k}, "head.uncertainty.image_log_var"),
    (lambda good: {**good, POSITIONS: good[POSITIONS][1:].clone()}, "positions is [16, 128] instead of [17, 128]"),
    (lambda good: {**good, BIAS: torch.zeros(127)}, "head.pooling.text_projection.bias is [127]"),
]


@pytest.mark.parametrize(("change", "word"), LACKING)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[State], State], word: str
) -> None:
    path = write(tmp_path / "hub", SMALL, change(SMALL.weights()))
    assert word in said(capsys, path, tmp_path / "out")


@pytest.mark.parametrize(
    ("part", "key", "value", "word"),
    [
        ("text_cfg", "embed_unc", False, "text_cfg.embed_unc"),
        ("vision_cfg", "timm_model_name", "vit", "vision_cfg.timm_model_name"),
        ("text_cfg", "vocab_size", 49408, "padded"),
    ],
)
def test_another_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, key: str, value: object, word: str
) -> None:
    path = write(tmp_path / "hub", SMALL, SMALL.weights())
    changed(path.parent, "config.json", **{f"{part}__{key}": value})
    assert word in said(capsys, path, tmp_path / "out")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_what_lies_beside_the_weights_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = write(tmp_path / "hub", SMALL, SMALL.weights())
    (path.parent / name).unlink()
    assert name in said(capsys, path, tmp_path / "out")


def test_released_settings_are_the_code_s() -> None:
    """Where they differ from those of `prolip`."""
    method = preset("prolip-released")
    made = build(sizes()["debug"], method, 0)
    assert float(made.head.log_scale.detach().exp()) == pytest.approx(1 / 0.07)
    for name in ("vib_image", "masked_image", "image_in_text"):
        said = method.terms[name][1](made.config).settings
        assert (said.vib_form, said.drop_patches, said.c, said.eps) == ("released", 0.25, 1000.0, -10.0)
