"""Released Llip weights: our model of them is the public code's forward pass, written out from its names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kiloword
from commands import refused
from kiloword.cli.main import main

K, WIDTH, DIM, HEADS, PATCHES, CONTEXT = 3, 32, 16, 2, 4, 77  # WIDTH of both towers, HEADS of both and of the mixture
State = dict[str, Tensor]
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


def weights(norms: bool, every: bool) -> State:
    """Random, and off the values (0 and 1) where an error would not show. Args: every: a projection per patch, too."""
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
    }
    layers = {f"{side}_norm": DIM for side in "KQV"} if norms else {}
    layers |= dict.fromkeys(("visual.ln_pre", "visual.ln_post", "ln_final"), WIDTH)
    for block in (f"{tower}transformer.resblocks.{n}" for tower in ("visual.", "") for n in range(2)):
        layers |= {f"{block}.ln_1": WIDTH, f"{block}.ln_2": WIDTH}
        sizes = (("attn.in_proj_", 3, 1), ("attn.out_proj.", 1, 1), ("mlp.c_fc.", 2, 1), ("mlp.c_proj.", 1, 2))
        for name, out, into in sizes:
            shapes |= {f"{block}.{name}weight": (out * WIDTH, into * WIDTH), f"{block}.{name}bias": (out * WIDTH,)}
    shapes |= {f"{layer}.{part}": (size,) for layer, size in layers.items() for part in ("weight", "bias")}
    generator = torch.Generator().manual_seed(0)
    state = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {n: x + 1 if ("ln_" in n or "norm" in n) and n.endswith("weight") else x for n, x in state.items()}


def norm(state: State, name: str, x: Tensor) -> Tensor:
    return (
        F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"]) if f"{name}.bias" in state else x
    )


def blocks(state: State, tower: str, x: Tensor, causal: bool) -> Tensor:
    for block in (f"{tower}transformer.resblocks.{n}" for n in range(2)):

        def layer(name: str, x: Tensor, block: str = block) -> Tensor:
            return F.linear(x, state[f"{block}.{name}weight"], state[f"{block}.{name}bias"])

        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in layer("attn.in_proj_", norm(state, f"{block}.ln_1", x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
        x = x + layer("attn.out_proj.", seen)
        hidden = layer("mlp.c_fc.", norm(state, f"{block}.ln_2", x))
        x = x + layer("mlp.c_proj.", hidden * (1.702 * hidden).sigmoid())
    return x


def scores(state: State, pixels: Tensor, ids: Tensor, every: bool) -> Tensor:
    """[I, T] of normalised images [I, 3, H, W] and padded texts [T, CONTEXT], whose end is the highest id."""
    x = F.conv2d(pixels, state["visual.conv1.weight"], stride=16).flatten(2).transpose(1, 2)
    x = torch.cat([state["visual.class_embedding"].expand(len(x), -1, -1), x], 1) + state["visual.positional_embedding"]
    x = norm(state, "visual.ln_post", blocks(state, "visual.", norm(state, "visual.ln_pre", x), False))
    h = x if every else x[:, :K]
    y = state["token_embedding.weight"][ids] + state["positional_embedding"]
    g = norm(state, "ln_final", blocks(state, "", y, True))[torch.arange(len(ids)), ids.argmax(1)]
    key, value, query = (
        norm(state, f"{side}_norm", projected).unflatten(-1, (HEADS, -1))
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
def test_our_model_is_their_forward_pass(tmp_path: Path, norms: bool, every: bool) -> None:
    state = weights(norms, every)
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
    expected = scores(state, ours.model.normalise(pixels), padded, every)
    assert expected.std() > 0.05
    torch.testing.assert_close(ours.score(pixels, texts), expected, rtol=0, atol=1e-5)
    for name, value in (("log_scale", state["logit_scale"]), ("bias", state["logit_bias"])):
        assert float(getattr(ours.model.head, name).detach()) == pytest.approx(float(value))


def test_weights_and_recipes_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.toml").write_text(RECIPE)
    good = weights(norms=False, every=False)
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
