"""The verb eval: what every task may be told. No torch at import: help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from kiloword.checkpoint.trust import NONE, Trust
from kiloword.evaluation.caption.options import CaptionOptions
from kiloword.evaluation.probe.options import ProbeOptions
from kiloword.evaluation.vqa.options import VqaOptions
from kiloword.evaluation.zeroshot.options import PromptOptions
from kiloword.generation.options import GenerationOptions

GENERATE = GenerationOptions()
JUDGE = CaptionOptions()
PROBE = ProbeOptions()
PROMPTS = PromptOptions()
VQA = VqaOptions()


def evaluate(
    model: Positional[str],
    task: Positional[str],
    data: str,
    with_: Annotated[tuple[str, ...], arg(name="with")] = (),
    shortlist: int | None = None,
    of: Literal["tower", "vec"] | None = None,
    samples: int | None = None,
    includes: Literal["inc", "h"] | None = None,
    eps: float | None = None,
    prompts: Literal["ensemble", "filter", "topk", "bprw"] | None = None,
    prompt_options: Annotated[PromptOptions, arg(name="prompts")] = PROMPTS,
    train: str | None = None,
    val: str | None = None,
    cache: Path | None = None,
    probe: ProbeOptions = PROBE,
    generate: GenerationOptions = GENERATE,
    judge: CaptionOptions = JUDGE,
    vqa: VqaOptions = VQA,
    json: Path | None = None,
    html: Path | None = None,
    batch: int = 256,
    workers: int | Literal["auto"] = "auto",
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    trust: Annotated[Trust, arg(name="")] = NONE,
) -> None:
    """Evaluate a model: kiloword eval runs/first/model retrieval --data scenes:test

    Several beside each other: kiloword eval A spectrum --with B --data photos/dev --html spectrum.html
    Captions of any captioner: kiloword eval captions.parquet caption --data photos/dev

    Args:
        model: model folder (OUT/model of a run); for caption also a parquet table (key, captions).
        task: retrieval, zeroshot, probe, caption, vqa, reconstruction, hierarchy, uncertainty or spectrum.
        data: test data; for zeroshot and probe with .cls labels and classnames.txt, or scenes:test?task=colour;
            for vqa with questions and answers, or scenes:test?task=vqa.
        with_: more model folders, evaluated on the same data and shown beside the first.
        shortlist: retrieval: score only the N nearest by vec exactly, and say what that loses.
        of: spectrum: tower (what the image tower puts out, the default) or vec.
        samples: spectrum: images, 5000 if not given.
        includes: hierarchy: what a caption includes an image most by, inc (the default) or h. With h at eps 0 the
            narrowest captions are chosen, not the most general.
        eps: hierarchy: log-space epsilon of inc and h, 0 if not given. At -10 or less distances hardly count: h then
            chooses the widest caption, inc the narrowest.
        prompts: zeroshot: how a class's prompts count: alike (ensemble, the default), the least uncertain (filter,
            topk), or as they explain images (bprw); all but the first need a model with Gaussians.
        prompt_options: zeroshot: what filter, topk and bprw may be told.
        train: probe: what it is fitted on; without it the split `train` that goes with --data. vqa: whose answers are
            those to choose from; without it the data's own list.
        val: probe: where its weight decay is chosen.
        cache: probe: folder that keeps the features.
        probe: probe: how it is fitted.
        generate: caption: how the model writes.
        judge: caption: how its captions are compared with those of the data.
        vqa: vqa: what answers there are, and how one is chosen.
        json: also write the numbers to this file.
        html: zeroshot, caption, reconstruction, spectrum, hierarchy, uncertainty: write a page with the plots.
        batch: images at a time.
        workers: loader processes; auto: none on a CPU, on CUDA the cores but two.
        device: auto, cpu, cuda, cuda:N.
        precision: of encoders and decoders; auto: bf16 on CUDA where the model is larger than size tiny, else fp32.
            Features, scores and probes are fp32.
        trust: whose code model folders may run; --method is MODEL's, and of --with where it is the same.
    """
    from kiloword.evaluation.command import main as run

    options: dict[str, object] = {
        "shortlist": shortlist,
        "of": of,
        "samples": samples,
        "includes": includes,
        "eps": eps,
    }
    options |= {"prompts": prompts, "prompt_options": None if prompt_options == PROMPTS else prompt_options}
    options |= {"train": train, "val": val, "cache": cache, "probe": None if probe == PROBE else probe}
    options |= {"generate": None if generate == GENERATE else generate, "judge": None if judge == JUDGE else judge}
    options |= {"vqa": None if vqa == VQA else vqa, "batch": batch}
    run([model, *with_], task, data, json, html, device, trust, precision, workers, **options)
