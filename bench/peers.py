"""kiloword beside what a user would take instead, in one process and in turns: peer's seconds over kiloword's.

Each contest first asserts that both sides have the same results. Peers are open_clip, onnxruntime on our own export,
CLIP_benchmark, pycocoevalcap, and faiss where it is installed. The last two rows have no peer: processor seconds of a
command. Prints a row of JSON a contest: the median ratio of turns, its range, and the median seconds of both.

    python bench/peers.py [texts images retrieval captions search commands] [--size b32] [--dtype bf16] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kiloword.apps.search.rank import best
from kiloword.cli.main import main as kiloword
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import clip_tokenizer
from kiloword.evaluation.caption_metrics import Captions, bleu, cider, rouge_l
from kiloword.evaluation.retrieval import retrieval
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from step import NAMES, cast, contestants, given

Side = Callable[[], Any]
Contest = tuple[str, str, Side, Side]
"""What, the peer's name, ours and theirs; results are compared where they are tensors."""
TURNS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*CONTESTS, "commands", []])
    parser.add_argument("--size", choices=[size for size in sizes() if size in NAMES], default="b32")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.set_defaults(compile=False, device="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for what in args.what or CONTESTS:
        if what in CONTESTS:
            for row in CONTESTS[what](args):
                print(json.dumps(judged(*row, args) | {"threads": args.threads}), flush=True)
    for row in commands() if "commands" in args.what or not args.what else ():
        print(json.dumps(row), flush=True)


@torch.inference_mode()
def judged(what: str, peer: str, ours: Side, theirs: Side, args: argparse.Namespace) -> dict[str, Any]:
    a, b = (torch.as_tensor(np.asarray(side())) for side in (ours, theirs))
    torch.testing.assert_close(a.to(b), b, rtol=0, atol=1e-5, msg=f"{what}, {peer}: other results")
    with cast(args):
        slow = seconds(ours) + seconds(theirs) > 5
        turns = [(seconds(ours), seconds(theirs)) for _ in range(3 if slow else TURNS)]
    ratios = sorted(their / our for our, their in turns)
    our, their = (round(statistics.median(side), 5) for side in zip(*turns, strict=True))
    return {
        "what": what,
        "peer": peer,
        "ratio": round(statistics.median(ratios), 3),
        "range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "kiloword_s": our,
        "peer_s": their,
    }


def seconds(side: Side) -> float:
    """Of as many calls as take a tenth of a second, of one."""
    began, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - began < 0.1:
        side()
        calls += 1
    return (time.perf_counter() - began) / calls


def texts(args: argparse.Namespace) -> Iterator[Contest]:
    ours, _, _, theirs = contestants(args)
    ours, theirs, runtime = ours.eval(), theirs.eval(), graph(ours, "text", args)
    for n in (1, 32):
        batch = given(ours, n, 1, 0, "cpu")
        lengths = batch.ours.texts.starts.diff()
        ids = batch.padded[:, : batch.ours.texts.longest]
        feed = {"input_ids": ids, "attention_mask": torch.arange(ids.shape[1]) < lengths[:, None]}
        feed = {name: feed[name].to(torch.int64).numpy() for name in (i.name for i in runtime.get_inputs())}

        def our(batch: Any = batch) -> torch.Tensor:
            return ours.encode_text(batch.ours.texts)[1]["vec"]

        yield f"{n} texts", "open_clip", our, lambda b=batch: theirs.encode_text(b.padded, normalize=True)
        yield f"{n} texts", "onnxruntime", our, lambda f=feed: runtime.run(["vec"], f)[0]


def images(args: argparse.Namespace) -> Iterator[Contest]:
    ours, _, _, theirs = contestants(args)
    ours, theirs, runtime = ours.eval(), theirs.eval(), graph(ours, "image", args)
    for n in (1, 8, 32):
        pixels = given(ours, n, 1, 0, "cpu").ours.images
        feed = {"pixel_values": ours.normalise(pixels).numpy()}

        def our(pixels: Any = pixels) -> torch.Tensor:
            return ours.image_features(pixels)["vec"]

        def their(pixels: Any = pixels) -> torch.Tensor:
            return theirs.encode_image(ours.normalise(pixels), normalize=True)

        yield f"{n} images", "open_clip", our, their
        yield f"{n} images", "onnxruntime", our, lambda f=feed: runtime.run(["vec"], f)[0]


def graph(model: Any, side: str, args: argparse.Namespace) -> Any:
    """Our own export of a tower in onnxruntime."""
    import onnxruntime

    tokenizer, folder = clip_tokenizer(), Path(tempfile.mkdtemp(prefix="peers-"))
    text = replace(model.config.text, special=tokenizer.roles.ids())
    config = replace(model.config, text=text)
    whole = build(config, preset("clip"), seed=0)
    whole.load_state_dict(model.state_dict())
    save_model(folder / "model", whole, tokenizer, ModelFile(method="clip", settings={}, model=config))
    kiloword(["export", "onnx", str(folder / "model"), "--out", str(folder / "onnx")])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = args.threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # it would take our side's cores
    return onnxruntime.InferenceSession(str(folder / "onnx" / f"{side}.onnx"), options)


def recalls(args: argparse.Namespace) -> Iterator[Contest]:
    """5,000 images and 25,000 captions, 512 numbers each."""
    from clip_benchmark.metrics.zeroshot_retrieval import batchify, recall_at_k

    noise = torch.Generator().manual_seed(0)
    image = F.normalize(torch.randn(5000, 512, generator=noise), dim=1)
    of_text = torch.arange(5000).repeat_interleave(5)
    text = F.normalize(image[of_text] + 0.3 * torch.randn(25_000, 512, generator=noise), dim=1)
    names = [f"{side}_retrieval_recall@{k}" for side in ("image", "text") for k in (1, 5, 10)]

    def ours() -> list[float]:
        found = dict(retrieval(lambda i, t: i["vec"] @ t["vec"].T, {"vec": image}, {"vec": text}, of_text))
        return [found[name] for name in names]

    def theirs() -> list[float]:
        scores = text @ image.T
        pairs = torch.zeros_like(scores, dtype=torch.bool)
        pairs[torch.arange(len(scores)), of_text] = True
        sides = ((scores, pairs), (scores.T, pairs.T))
        found = [batchify(recall_at_k, *side, 64, "cpu", k=k) for side in sides for k in (1, 5, 10)]
        return [(one > 0).float().mean().item() for one in found]

    yield "retrieval, 5k images, 25k texts", "CLIP_benchmark", ours, theirs


def captions(args: argparse.Namespace) -> Iterator[Contest]:
    """BLEU, ROUGE-L and CIDEr-D of 5,000 captions, with five references each."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    rng = np.random.default_rng(0)
    words = np.array([f"word{n}" for n in range(3000)])
    share = 1 / np.arange(1, 3001)

    def sentences(n: int) -> list[str]:
        lengths = rng.integers(8, 14, n)
        return [" ".join(rng.choice(words, length, p=share / share.sum())) for length in lengths]

    said, known = sentences(5000), [sentences(5) for _ in range(5000)]

    def ours() -> list[float]:
        made = Captions(said, known)
        return [*bleu(made), rouge_l(made).mean(), cider(made).mean()]

    def theirs() -> list[float]:
        references, candidates = dict(enumerate(known)), {n: [one] for n, one in enumerate(said)}
        values = (scorer.compute_score(references, candidates)[0] for scorer in (Rouge(), Cider()))
        return [*Bleu(4).compute_score(references, candidates, verbose=0)[0], *values]

    yield "BLEU, ROUGE-L, CIDEr-D, 5k images", "pycocoevalcap", ours, theirs


def search(args: argparse.Namespace) -> Iterator[Contest]:
    """The best 50 of 150,000 vectors, as `kiloword search` finds them."""
    if find_spec("faiss") is None:
        print("faiss is not installed: no contest of searches", file=sys.stderr)
        return
    import faiss

    faiss.omp_set_num_threads(args.threads)
    rng = np.random.default_rng(0)
    stored = rng.standard_normal((150_000, 512), dtype=np.float32)
    query = stored[7] + rng.standard_normal(512, dtype=np.float32)
    flat = faiss.IndexFlatIP(512)
    flat.add(stored)
    yield "150k vectors", "faiss", lambda: best(stored @ query, 50), lambda: flat.search(query[None], 50)[1][0]


def commands() -> Iterator[dict[str, Any]]:
    """Processor seconds, the least of three."""
    with tempfile.TemporaryDirectory() as folder:
        train = "train siglip --data scenes --size debug --steps 1 --out"
        for words in ("train siglip --help", train):
            spent = []
            for turn in range(3):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                more = [f"{folder}/{turn}"] if words == train else []
                command = [sys.executable, "-m", "kiloword", *words.split(), *more]
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            yield {"what": f"kiloword {words}", "processor_s": round(min(spent), 2)}


CONTESTS: dict[str, Callable[[argparse.Namespace], Iterator[Contest]]] = {
    "texts": texts,
    "images": images,
    "retrieval": recalls,
    "captions": captions,
    "search": search,
}

if __name__ == "__main__":
    main()
