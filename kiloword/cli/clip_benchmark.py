"""CLIP_benchmark's own command with `--model_type kiloword`: python -m kiloword.cli.clip_benchmark eval ...

CLIP_benchmark 1.6 looks models up in a table that only code can extend; this module adds a line to it and calls its
command. `--model` is a model folder or what `kiloword.load` takes, or `kiloword`, where `--pretrained` is. It judges
cosines of single vectors, "vec": where a model's own score is another one (llip, prolip), `kiloword eval` judges that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kiloword.api import Matcher, load
from kiloword.errors import naming_truncated
from kiloword.types import Texts


class Towers(nn.Module):
    """A model as CLIP_benchmark calls it: two encoders of batches."""

    def __init__(self, matcher: Matcher) -> None:
        super().__init__()
        self.model = matcher.model

    def encode_image(self, images: Tensor) -> Tensor:
        """uint8 [n, 3, H, W] -> [n, D], norm 1."""
        return self.model.image_features(images)["vec"]

    def encode_text(self, texts: Texts) -> Tensor:
        """T packed texts -> [T, D], norm 1."""
        return self.model.encode_text(texts)[1]["vec"]


def load_kiloword(model_name: str, pretrained: str, cache_dir: str | None = None, device: Any = "cpu") -> Any:
    """What CLIP_benchmark calls: (model, transform of a Pillow image, tokenizer of a list of texts)."""
    matcher = load(pretrained if model_name == "kiloword" else model_name, str(device))
    return Towers(matcher), matcher.preprocess, lambda texts: matcher.tokenizer.encode(texts, matcher.model.config.text)


def main() -> None:
    """Run CLIP_benchmark's command on the words of this one."""
    from kiloword.model.trunks.libraries import torchvision_ready

    torchvision_ready()
    try:
        from clip_benchmark import cli, models
        from clip_benchmark.metrics import zeroshot_classification
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"CLIP_benchmark cannot be imported: it needs {error.name}. pip install clip_benchmark"
        ) from None

    models.TYPE2FUNC["kiloword"] = load_kiloword
    models.MODEL_TYPES.append("kiloword")  # a choice of its parser
    # its accuracy() calls float() on an array [1], which numpy 2.4 refuses
    zeroshot_classification.float = lambda value: value.item() if hasattr(value, "item") else float(value)
    with naming_truncated():
        cli.main()


if __name__ == "__main__":
    main()
