"""The task `probe`: linear probes on frozen features."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kiloword.evaluation.probe.options import ProbeOptions
from kiloword.evaluation.task import Data, Deferred, Task


@dataclass(frozen=True, kw_only=True)
class ProbeTaskOptions:
    """What the probe is fitted on, and how."""

    train: Data | None = None  # training data; None: the split `train` that goes with --data
    val: Data | None = None  # data on which the weight decay is chosen
    cache: Path | None = None  # folder that keeps the features
    probe: ProbeOptions = field(default_factory=ProbeOptions)


TASK = Task(
    name="probe",
    help="Fit a linear layer on frozen image features, and classify with it: accuracy.",
    data="images with .cls labels, or scenes:test?task=colour",
    options=ProbeTaskOptions,
    run=Deferred("kiloword.evaluation.probe.task:run"),
    printed=Deferred("kiloword.evaluation.probe.task:printed"),
)
