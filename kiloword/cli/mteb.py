"""A model as MTEB and MIEB evaluate it: `mteb.evaluate(encoder("runs/first/model"), mteb.get_tasks(tasks=[...]))`.

They compare single vectors, "vec", by cosine. If a model has another score (llip, prolip), `kiloword eval` uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kiloword.api import Matcher, load
from kiloword.apps.search.index import fingerprint
from kiloword.errors import naming_truncated


@naming_truncated()
def embeddings(matcher: Matcher, inputs: Iterable[Mapping[str, Any]]) -> Tensor:
    """Vectors [N, D] of batches with a list "image" or "text"; where they have both, the sums, as mteb's CLIP has."""
    of_kind = {"image": matcher.encode_image, "text": matcher.encode_text}
    parts = [[encode(batch[kind])["vec"] for kind, encode in of_kind.items() if kind in batch] for batch in inputs]
    return torch.cat([torch.stack(part).sum(0) for part in parts]).cpu()


def encoder(path: str, **settings: Any) -> Any:
    """A model for `mteb.evaluate`, which keeps results by path and weights. Args, errors: as of `kiloword.load`."""
    from mteb.models import ModelMeta
    from mteb.models.abs_encoder import AbsEncoder

    matcher = load(path, **settings)

    class Encoder(AbsEncoder):  # type: ignore[misc]
        mteb_model_meta = ModelMeta.create_empty(
            {"name": f"kiloword/{path}", "revision": fingerprint(matcher), "modalities": ["image", "text"]}
        )

        def encode(self, inputs: Any, **task: Any) -> Tensor:
            return embeddings(matcher, inputs)

    return Encoder()
