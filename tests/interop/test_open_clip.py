"""Our towers and text decoder with open_clip's weights are open_clip's: features of every model, and gradients."""

from __future__ import annotations

import json
import math
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import kiloword
from cases import mostly_slow
from folders import write_encoder
from kiloword.cli.main import main as run
from kiloword.interop.folder import import_as
from kiloword.interop.open_clip import config_of, import_state, main
from kiloword.interop.open_clip_config import Unlike, raw_config, translate
from kiloword.interop.state_dicts import translated
from kiloword.methods.coca.coca import decoded
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.models.model_folder import load_model, read_model_file
from kiloword.types import Texts
from other_libraries import first_losses

FAMILIES = {  # name: its models, and those that are refused
    "resnet": (r"RN", r"$"),
    "siglip": (r".*SigLIP", r"ViT-SO400M-16-SigLIP-i18n"),
    "coca": (r"coca", r"coca_(base|roberta)"),
    "clip": (r"ViT-", r".*(CLIPA|worldwide|ViT-M-16-alt)"),
    "others": (r"", r""),
}
VOCAB, BLOCKS = 64, 2


def coca(memory: int = 32, **text: Any) -> dict[str, Any]:
    """A configuration of a small CoCa as open_clip's files have them; memory: width of what is pooled."""
    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16, "output_tokens": True}
    vision |= {"attentional_pool": True, "attn_pooler_heads": 4, "attn_pooler_queries": 5}
    words = {"context_length": 10, "vocab_size": VOCAB, "width": memory, "heads": 2}
    return {
        "embed_dim": memory,
        "vision_cfg": vision,
        "text_cfg": {**words, "layers": 2, "embed_cls": True, "output_tokens": True, **text},
        "multimodal_cfg": {**words, "layers": 1, "attn_pooler_heads": 4},
    }


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with few blocks and words; of a ResNet, whose depths are given, with few channels."""
    vision, text = dict(config["vision_cfg"]), config["text_cfg"] | {"layers": BLOCKS, "vocab_size": VOCAB}
    if isinstance(vision.get("layers"), list):
        vision["width"] = 8
    elif "layers" in vision:
        vision["layers"] = BLOCKS
    if "multimodal_cfg" in config:
        config["multimodal_cfg"] |= {"layers": BLOCKS, "vocab_size": VOCAB}
    return config | {"vision_cfg": vision, "text_cfg": text}


def created(open_clip: ModuleType, config: dict[str, Any]) -> Any:
    """open_clip's model, off the values where an error would not show."""
    options = dict(config) | {"text_cfg": dict(config["text_cfg"])}
    custom, correct = options.pop("custom_text", False), options["text_cfg"].pop("correct_cls_mask", None)
    kind = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CustomTextCLIP if custom else open_clip.CLIP
    model = kind(**options)
    if correct is not None:
        model.text.correct_cls_mask = correct
    generator = torch.Generator().manual_seed(0)
    for value in model.parameters():
        if value.ndim == 1:
            value.data.add_(0.1 * torch.randn(value.shape, generator=generator))
        elif value.ndim == 2:  # CoCa leaves some as the memory was
            value.data.copy_(torch.randn(value.shape, generator=generator) * min(value.shape) ** -0.5)
    return model.eval()


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """SigLIP's towers of timm have few blocks."""
    timm = pytest.importorskip("timm")
    make = timm.create_model

    def few(name: str, *args: Any, **options: Any) -> Any:
        return make(name, *args, **options, **({"depth": BLOCKS} if "siglip" in name else {}))

    monkeypatch.setattr(timm, "create_model", few)


def converted(name: str, config: dict[str, Any], theirs: Any) -> tuple[Model, str]:
    """Our model with their weights, and its method."""
    decoder = config.get("multimodal_cfg", {}).get("layers", 0)
    imported = import_as(translate(name, config), name, theirs.state_dict(), decoder)
    assert imported.left_over == []
    ours = build(imported.config, preset(imported.method, imported.settings), seed=0)
    ours.load_state_dict({**ours.state_dict(), **imported.state})  # they have no row of a mask
    return ours.eval(), imported.method


def captions(ours: Model) -> tuple[Tensor, Texts, list[int]]:
    """Their padded ids, our packed texts with the tokens that our tower adds, and the lengths without them."""
    text = ours.config.text
    tail = [text.special[name] for name in text.extra_tokens]
    padded, lengths = torch.zeros(3, text.context - bool(tail), dtype=torch.int64), [3, 5, text.context]
    lengths[-1] -= max(len(tail), 1)
    for row, length in zip(padded, lengths, strict=True):
        row[:length] = torch.randint(1, VOCAB - 2, (length,), generator=torch.Generator().manual_seed(length))
        row[0], row[length - 1] = VOCAB - 2, VOCAB - 1
    rows = [row.tolist() if text.pad_to_context else [*row[row > 0].tolist(), *tail] for row in padded]
    return padded, Texts.pack(rows), lengths


def noise(ours: Model, images: int) -> Tensor:
    shape = (images, 3, ours.config.image.size, ours.config.image.size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def difference(theirs: Any, ours: Model) -> float:
    """The largest difference of features of images and texts."""
    pixels, (padded, texts, _) = noise(ours, 1), captions(ours)
    pairs = [
        (ours.encode_image(pixels)[1]["vec"], theirs.encode_image(ours.normalise(pixels), normalize=True)),
        (ours.encode_text(texts)[1]["vec"], theirs.encode_text(padded, normalize=True)),
    ]
    return max(float((found - expected).abs().max()) for found, expected in pairs)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("shallow")
def test_every_name(open_clip: ModuleType, family: str) -> None:
    """Each model with two blocks a tower: its features are equal here, or it is refused."""
    equal, refused, wrong = [], [], {}
    for name in open_clip.list_models():
        if next(kind for kind, (names, _) in FAMILIES.items() if re.match(names, name)) != family:
            continue
        config = shrunk(open_clip.get_model_config(name))
        try:
            translate(name, config)
        except Unlike:
            refused.append(name)
            continue
        theirs = created(open_clip, config)
        largest = difference(theirs, converted(name, config, theirs)[0])
        if largest < 1e-4:
            equal.append(name)
        else:
            wrong[name] = largest
    assert not wrong
    pattern = FAMILIES[family][1]
    assert all(re.match(pattern, name) for name in refused), refused
    assert not any(re.match(pattern, name) for name in equal), equal


SMALL = {"image_size": 64, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16}
WORDS = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
TIMM = {"timm_model_name": "test_convnext", "timm_pool": "", "timm_proj": "linear", "image_size": 64}
WHOLE: dict[str, dict[str, Any]] = {  # what ConvNeXt, ViTamin, CLIPA, XLM-R's towers and MetaCLIP 2 have
    "timm": {"vision_cfg": TIMM, "text_cfg": WORDS | {"no_causal_mask": True, "proj_bias": True}},
    "clipa": {
        "vision_cfg": SMALL | {"no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True},
        "text_cfg": WORDS | {"vocab_size": 91, "pool_type": "last", "tokenizer_kwargs": {"strip_sep_token": True}},
    },
    "bert": {"vision_cfg": SMALL, "text_cfg": {"context_length": 12, "hf_pooler_type": "mean_pooler"}},
    "eos": {"vision_cfg": SMALL, "text_cfg": WORDS | {"pool_type": "eos", "eos_id": 49407}, "init_logit_bias": -10},
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_model_of_other_towers_is_used_whole(open_clip: ModuleType, tmp_path: Path, kind: str) -> None:
    """Features, tokens, and the loss before the first step; it is tuned, saved and exported as any model."""
    torch.manual_seed(0)
    config, folder = {"embed_dim": 24, **WHOLE[kind]}, str(write_encoder(tmp_path / "words"))
    if kind in ("bert", "clipa"):
        named = {"hf_tokenizer_name": folder} | ({"hf_model_name": folder} if kind == "bert" else {})
        config["text_cfg"] = config["text_cfg"] | named
        shutil.copy(f"{folder}/tokenizer.json", tmp_path)
    (tmp_path / f"kw-{kind}.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / f"kw-{kind}.json")
    theirs = open_clip.create_model(f"kw-{kind}").eval()
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    name = f"open_clip:kw-{kind}:{tmp_path / 'w.pt'}"
    ours, texts = kiloword.load(name), ["a red dog", "it's 2 Cats!", "word " * 90, ""]
    pixels = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        images = theirs.encode_image(ours.model.normalise(pixels), normalize=True)
        words = theirs.encode_text(open_clip.get_tokenizer(f"kw-{kind}")(texts), normalize=True)
    for model in (ours, kiloword.load(ours.save(tmp_path / "own"))):
        torch.testing.assert_close(model.encode_image(pixels)["vec"], images, atol=1e-6, rtol=0)
        torch.testing.assert_close(model.encode_text(texts)["vec"], words, atol=1e-6, rtol=0)
    assert math.isclose(*first_losses(ours, name, tmp_path / "run"), rel_tol=1e-4)
    if find_spec("onnxruntime") and kind == "timm":
        run(["export", "onnx", str(tmp_path / "run" / "model"), "--out", str(tmp_path / "onnx")])


def test_which_models_of_open_clip_are_used_whole_and_which_are_refused(open_clip: ModuleType) -> None:
    """All of them: by a configuration, without weights."""
    kinds: dict[str, list[str]] = {"own": [], "whole": [], "refused": []}
    for name in open_clip.list_models():
        try:
            kinds["whole" if config_of(name, raw_config(name)).image.trunk.whole else "own"].append(name)
        except Unlike:
            kinds["refused"].append(name)
    assert not [name for name in kinds["refused"] if not name.startswith("coca")]
    assert len(kinds["own"]) > 60
    assert len(kinds["whole"]) > 65


def outputs(theirs: Any, ours: Model) -> list[tuple[Tensor, Tensor]]:
    """Ours and theirs: features, scale and bias; of a CoCa also the memory of its decoder and the logits of words."""
    pixels, (padded, texts, lengths) = noise(ours, 3), captions(ours)
    given, head = ours.normalise(pixels), ours.head
    (image_tokens, images), (text_tokens, words) = ours.encode_image(pixels), ours.encode_text(texts)
    found = [images["vec"], words["vec"], head.log_scale.exp(), *([] if head.bias is None else [head.bias])]
    out = theirs(given, padded)
    if "text_decoder" not in ours.more:
        return list(zip(found, out, strict=True))
    decoder: Any = ours.more["text_decoder"]
    memory = ours.memory(image_tokens)
    x, targets = decoded(ours, texts, text_tokens, decoder.remember(memory))
    assert targets.tolist() == [i for row, length in zip(padded, lengths, strict=True) for i in row[1:length].tolist()]
    found += [memory, x @ decoder.table(ours.text_tower.tokens).T]
    logits = torch.cat([row[: length - 1] for row, length in zip(out["logits"], lengths, strict=True)])
    expected = [*(out[name] for name in ("image_features", "text_features", "logit_scale")), theirs.visual(given)[1]]
    return list(zip(found, [*expected, logits], strict=True))


CASES: list[Any] = ["ViT-B-32", "ViT-B-16-quickgelu", "ViT-B-16-SigLIP"]
CASES += [coca(memory, correct_cls_mask=correct) for memory in (32, 48) for correct in (True, False)]


@pytest.mark.parametrize("case", mostly_slow(CASES, 0, 3, 4, 5, 6))
@pytest.mark.usefixtures("shallow")
def test_values_and_gradients_in_double_precision(open_clip: ModuleType, case: Any) -> None:
    """Of models by name, and of CoCas with both masks of the class token."""
    name, config = ("coca", case) if isinstance(case, dict) else (case, shrunk(open_clip.get_model_config(case)))
    theirs = created(open_clip, config).double()
    ours, method = converted(name, config, theirs)
    ours.double()
    assert method == ("coca" if name == "coca" else "siglip" if "SigLIP" in name else "clip")
    losses = [torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)]
    for found, expected in outputs(theirs, ours):
        assert found.numel() == expected.numel()
        assert float((found - expected).detach().abs().max()) < 1e-12
        weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        losses = [loss + (weights * x).sum() for loss, x in zip(losses, (found, expected), strict=True)]
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    given = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    wanted, unused = translated(given, dict(ours.named_parameters()))
    assert not unused
    for key, p in ours.named_parameters():
        assert p.grad is not None, key
        a, b = p.grad, wanted.pop(key)
        if name == "coca" and key == "text_tower.tokens":  # but the row of the mask, which they do not have
            a, b = (g[torch.arange(len(g)) != ours.config.text.special["mask"]] for g in (a, b))
        assert float((a - b).norm()) < 1e-8 * float(b.norm()) + 1e-12, key
    assert not wanted


@pytest.mark.slow
def test_import_of_a_coca(open_clip: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`kiloword import open_clip coca_ViT-B-32`: texts through both tokenizers give the same features."""
    theirs = created(open_clip, open_clip.get_model_config("coca_ViT-B-32"))
    theirs.text.correct_cls_mask = False
    save_file({k: v.contiguous() for k, v in theirs.state_dict().items()}, tmp_path / "w.safetensors")
    words = ["two dogs run over wet sand", "a red star", "nothing"]
    with torch.no_grad():
        wanted = theirs.encode_text(open_clip.get_tokenizer("coca_ViT-B-32")(words))
    del theirs  # a gigabyte
    main("coca_ViT-B-32", tmp_path / "w.safetensors", tmp_path / "out")
    assert "left over: " not in capsys.readouterr().out
    assert read_model_file(tmp_path / "out").method == "coca"
    ours, tokenizer = load_model(tmp_path / "out")
    with torch.no_grad():
        _, features = ours.encode_text(tokenizer.encode(words, ours.config.text))
    torch.testing.assert_close(features["vec"], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bias", mostly_slow([False, True], 1))
def test_import_writes_a_folder_and_says_what_happened(
    open_clip: ModuleType, bias: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, path = {"embed_dim": 16, "vision_cfg": SMALL, "text_cfg": WORDS}, tmp_path / "ViT-X.json"
    told = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"} if bias else {"std": [0.5] * 3}
    path.write_text(json.dumps(config | {"preprocess_cfg": told}))
    theirs = open_clip.CLIP(**config, init_logit_scale=math.log(112.3), init_logit_bias=-12.9 if bias else None)
    torch.nn.init.ones_(theirs.token_embedding.weight)
    torch.save({**theirs.state_dict(), "unheard.of": torch.ones(1)}, tmp_path / "w.pt")
    main(str(path), tmp_path / "w.pt", tmp_path / "out")
    printed = capsys.readouterr().out
    assert ("left over: unheard.of" in printed, "mean, resize_mode assumed" in printed) == (True, not bias)
    model, tokenizer = load_model(tmp_path / "out")
    assert read_model_file(tmp_path / "out").method == ("siglip" if bias else "clip")
    assert model.head.log_scale.exp().item() == pytest.approx(112.3)
    model.head.clamp_()
    assert model.head.log_scale.exp().item() == pytest.approx(112.3)
    assert model.head.bias is None or model.head.bias.item() == pytest.approx(-12.9)
    assert (model.text_tower.tokens == 1).all()
    assert tokenizer.roles.end == 49407
    with pytest.raises(ValueError, match="not an empty folder"):
        main(str(path), tmp_path / "w.pt", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "state", "word"),
    [
        ("ViT-B-31", {}, "ViT-B-31"),
        ("roberta-ViT-B-32", {}, "cached files"),
        ("coca_base", {}, "attentional_pool"),
        ("coca_roberta-ViT-B-32", {}, "hf_model_name"),
        ("ViT-B-32", {"conv.weight": torch.zeros(1)}, "none of these weights"),
        ("ViT-B-32", {"token_embedding.weight": torch.zeros(10, 512)}, "missing image_tower"),
    ],
)
def test_what_is_refused(open_clip: ModuleType, name: str, state: dict[str, Tensor], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        import_state(name, state)


def test_configurations_of_coca(open_clip: ModuleType) -> None:
    large = translate("coca_ViT-L-14", raw_config("coca_ViT-L-14"))
    assert (large.head.image_pool, large.head.pool_queries, large.head.pool_width) == ("attentional", 255, 768)
    assert (large.text.context, large.text.vocab, large.text.extra_tokens) == (77, 49410, ("pad", "cls"))
    with pytest.raises(Unlike, match=r"multimodal_cfg\.heads"):
        translate("mine", {**coca(), "multimodal_cfg": {**coca()["multimodal_cfg"], "heads": 4}})
