"""The tasks, and the options of each. No torch here, so that help is instant; what runs is in the task's own file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from kiloword.config.recipes import Nearest
from kiloword.config.settings import BaseSettings, setting
from kiloword.evaluation.task import ClassNames, Data, Prompts as PromptTexts, PythonOnly, Task
from kiloword.generation.options import GenerationOptions

TokenizerName = Literal["own", "ptb"]

Way = Literal["ensemble", "filter", "topk", "bprw"]


@dataclass(frozen=True, kw_only=True)
class PromptOptions(BaseSettings):
    """How prompts are combined, and options of the prompt selection bprw."""

    # normalise the mean of a class; None: yes, but not with bprw (as in the authors' code). Section 4.2: no
    renormalise: bool | None = None
    # variance of a class of prompts with weights p: sum p var (1 / N when equal), or sum p^2 var (1 / N^2, of their
    # average); None: squares with bprw, otherwise as the model was trained (--settings.ensemble)
    variance: Literal["linear", "squares"] | None = None
    shots: int = 0  # bprw: labelled images per class to fit on, excluded from scoring; 0: the nearest, unlabelled
    seed: int = 0  # bprw: seed of the samples and of the choice of labelled images


@dataclass(frozen=True, kw_only=True)
class RetrievalTaskOptions:
    """How pairs are ranked."""

    # score to use in place of the model's own: cosine of the features (of Gaussians: of the means), or csd, the
    # closed-form sampled distance of Gaussians
    nearest: Nearest | None = None
    shortlist: int | None = None  # score only the N nearest images or texts exactly; prints the recall that this loses
    # further positives beside the annotated pairs: ECCV Caption's or CxC's json of ids with COCO's annotations,
    # FILE?captions=captions_val2014.json
    extra_positives: str | None = None
    folds: int = 1  # mean of recall@k over N equal parts of the images, in order; COCO 1K: 5 of the 5000
    ks: PythonOnly[tuple[int, ...]] = (1, 5, 10)  # of recall@k


@dataclass(frozen=True, kw_only=True)
class CompositionalTaskOptions:
    """Which captions are compared."""

    # json or jsonl of SugarCrepe, SugarCrepe++, Winoground, ARO or VALSE, as distributed, or a folder of such files
    pairs: str | None = None


@dataclass(frozen=True, kw_only=True)
class WinogavilTaskOptions:
    """Which associations are asked for."""

    pairs: Path | None = None  # winogavil_dataset.csv: columns `cue`, `candidates` and `associations`


@dataclass(frozen=True, kw_only=True)
class ZeroshotTaskOptions:
    """How the prompts of a class become its classifier."""

    # prompts of a class: all alike (ensemble), the least uncertain (filter, topk), or weighted by how well they explain
    # images (bprw). filter, topk and bprw need a model with Gaussians
    prompts: Way = "ensemble"
    # how prompts are combined, and parameters of bprw
    prompt_options: Annotated[PromptOptions, arg(name="prompts")] = field(default_factory=PromptOptions)
    # score of an image and a class; None: the model's own, which does not subtract half the squared norm of the class's
    # mean, as csd does
    nearest: Nearest | None = None
    # class names: a text file with one per line, a JSON file, or a data set (kiloword data names). None: of the data
    classnames: ClassNames | None = None
    # prompts with {c} or {} for the class name: a file, a data set, or one template. None: those of the data, of the
    # data set that --classnames names, or the class name alone
    templates: PromptTexts | None = None
    # fields of the json, or of FILE?info=COLUMN, whose values are groups of images: accuracy of each, and of the worst;
    # npy.0: the first number of the .npy beside a .cls; NAME=FIELD: FIELD where there is no NAME
    group_by: tuple[str, ...] = ()
    any_label: bool = False  # an image with several classes is right if any of them is among the first: acc1, acc5
    macro_f1: bool = False  # also F1 as a mean over the classes that occur
    attributes: bool = False  # class names are "attribute object": also the accuracy of each of the two


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(BaseSettings):
    """Settings of the probe; None: the value of the recipe."""

    # as in: FFF (adamw), SLIP and CLIP-C (sgd), CLIP (lbfgs). sgd and lbfgs classify features before the projection to
    # the embedding
    recipe: Literal["clip_benchmark", "adamw", "sgd", "lbfgs"] = "clip_benchmark"
    lr: float = setting(0.1, "learning rate at the start of the cosine", 0)
    epochs: int | None = setting(None, "passes over the data. None: clip_benchmark 10, adamw 20, sgd 50", 1)
    batch: int | None = setting(None, "images in a step. None: 64, sgd 256", 1)
    weight_decay: float | None = setting(
        None,
        "weight decay of the optimiser; lbfgs: 1 / C of scikit-learn. None: chosen on --val, which lbfgs needs, else 0",
        0,
    )
    shots: int = setting(0, "training images per class, drawn by the seed; 0: all", 0)
    seed: int = 0  # of draws, shuffles and first weights


@dataclass(frozen=True, kw_only=True)
class ProbeTaskOptions:
    """What the probe is fitted on, and how."""

    train: Data | None = None  # training data, which must be given
    val: Data | None = None  # data on which the weight decay is chosen
    # class names: a text file with one per line, a JSON file, or a data set (kiloword data names). None: of the data
    classnames: ClassNames | None = None
    probe: ProbeOptions = field(default_factory=ProbeOptions)  # settings of the probe; None: the value of the recipe


@dataclass(frozen=True, kw_only=True)
class CaptionOptions(BaseSettings):
    """How captions are compared with those that people wrote."""

    tokenizer: TokenizerName = "own"  # ptb: pycocoevalcap's, in Java; COCO metrics differ by 0.0003
    meteor: bool = True  # METEOR through pycocoevalcap; omitted with a note where it or Java is missing
    spice: bool = False  # SPICE through pycocoevalcap, where Stanford's models are installed


@dataclass(frozen=True, kw_only=True)
class CaptionTaskOptions:
    """How captions are generated, and how they are scored."""

    generate: GenerationOptions = field(default_factory=GenerationOptions)
    judge: CaptionOptions = field(default_factory=CaptionOptions)
    clipscore: str | None = None  # a model of images and texts, whose CLIPScore and RefCLIPScore are added
    # fields of the json, or of FILE?info=COLUMN, whose values are groups of images: figures of each; by default NoCaps'
    # domain, where images have it
    group_by: tuple[str, ...] = ()
    # write the captions as COCO and NoCaps take them; images may lack captions of their own
    results: Path | None = None
    captions: PythonOnly[Path | None] = None  # table whose captions are scored, the first of each key; None: a model's


@dataclass(frozen=True, kw_only=True)
class VqaOptions(BaseSettings):
    """The possible answers, and how one is chosen."""

    answers: Path | None = None  # file with one possible answer per line; None: the answers of --train, or of the data
    most: int = setting(3128, "use this many of the most frequent answers of --train", 1)
    decode: Literal["list", "free"] = "list"  # list: word by word within the list; free: any words
    beams: int = setting(5, "list and free: number of unfinished answers to keep; 1: greedy", 1)
    length_penalty: float = 0.0  # score of an answer = log probability / tokens^length_penalty


@dataclass(frozen=True, kw_only=True)
class VqaTaskOptions:
    """Which answers there are, and how one is chosen."""

    train: Data | None = None  # data whose answers are possible answers; None: the test data
    results: Path | None = None  # write the answers as VQA's server takes them; questions may lack answers
    vqa: VqaOptions = field(default_factory=VqaOptions)


NAMED = "the images that --pairs names, by key or file name"
LABELLED = "class folders, a table with a column `label`, tars with .cls, or scenes:test?task=colour"
TASKS = {
    task.name: task
    for task in (
        Task(
            "retrieval",
            "Rank images by text and texts by image: recall@k; mean average precision where truth is known.",
            "images with captions",
            options=RetrievalTaskOptions,
            higher="recall|precision|(^|_)map(@|$)",
            reads="captions",
            encodes=True,
        ),
        Task(
            "compositional",
            "Compare the scores of true and false captions: SugarCrepe, Winoground, ARO, VALSE.",
            NAMED,
            options=CompositionalTaskOptions,
            hidden=r"_(chance|items)@",
        ),
        Task(
            "winogavil",
            "Find the images that people associate with a cue: Jaccard index, as in DataComp.",
            NAMED,
            options=WinogavilTaskOptions,
        ),
        Task(
            "zeroshot",
            "Classify images by prompts of the class names: accuracy, or mean average precision of many labels.",
            LABELLED,
            options=ZeroshotTaskOptions,
            hidden="^(weight|average_precision)@|^count_",
            higher="acc|recall|precision|F1",
            reads="classes",
            encodes=True,
        ),
        Task(
            "probe",
            "Fit a linear layer on frozen image features, and classify with it: accuracy.",
            LABELLED,
            options=ProbeTaskOptions,
            hidden="^sweep@",
            reads="training data",
        ),
        Task(
            "caption",
            "Caption images, and compare with people's captions: CIDEr-D, BLEU, METEOR, ROUGE-L, CLIPScore.",
            "images with captions",
            models="model folder (OUT/model of a run), or any captioner's parquet table (key, captions) or COCO result "
            "file; several are compared",
            options=CaptionTaskOptions,
            hidden="^bleu_[23]",
            higher="cider|bleu|meteor|rouge|spice|score|true(@|$)",
            reads="captions",
        ),
        Task(
            "vqa",
            "Answer questions about images: VQA accuracy.",
            "images with questions and answers, or scenes:test?task=vqa",
            options=VqaTaskOptions,
            higher="accuracy",
        ),
        Task(
            "reconstruction",
            "Reconstruct hidden patches from the right caption, a wrong one and none: L1 of each.",
            "images with captions",
            higher="right_beats",
            lower="(^|_)l1_",
        ),
        Task(
            "hierarchy",
            "Retrieve from general to specific captions along chains, and measure uncertainty by level.",
            "images with chains of captions (`hierarchies`) or of several levels (HierarImgs), or scenes",
            higher="recall|precision|hit$",
        ),
        Task(
            "uncertainty",
            "Compare the uncertainty of images and texts with lengths, levels, truth and errors (calibration).",
            "images with captions; the model needs Gaussians",
            hidden=r"_right@|_uncertainty@|_q(25|75)$",  # bins, most quantiles
        ),
        Task(
            "spectrum",
            "Compute the singular values of the covariance of image features, and their effective rank.",
            "images",
            hidden=r"@(?!(1|2|4|8|16|32|64|128|256|512|1024|2048|4096)$)",  # singular values 3, 5, 6, 7, ...
        ),
    )
}
"""The tasks by name."""
