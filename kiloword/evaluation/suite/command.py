"""The verb `eval suite`: models on all data sets of a suite, in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kiloword.distributed.device import choose
from kiloword.distributed.sharing import is_first, together
from kiloword.evaluation.command import Execution, check_model, labels, opened
from kiloword.evaluation.suite import Output, Suite, read_suite
from kiloword.evaluation.suite.outcomes import Outcome, averages, outcomes
from kiloword.evaluation.suite.output import as_csv, as_json, lines, problems, report
from kiloword.evaluation.suite.run import evaluate_all
from kiloword.files import write_atomic, write_json
from kiloword.models.trust import Trust
from kiloword.report import made_by, signed, write
from kiloword.terminal import say
from kiloword.terminal.progress import showing


def main(
    name: str,
    models: Sequence[str],
    data: Path,
    only: Sequence[str],
    output: Output,
    execution: Execution,
    dry_run: bool,
) -> None:
    """Evaluate the models, print the table, write what is asked for. Exits with 1 where a data set failed."""
    suite = read_suite(name)
    every = outcomes(suite, data, only)
    if dry_run:
        for one in every:
            if one.source is not None:
                say(f"{one.entry.name}: {one.entry.task} on {one.source}, {' and '.join(one.entry.metrics)}")
        say(*problems(every))
        return
    execution = replace(execution, device=choose(execution.device))
    named = labels(models)
    for folder in models:
        check_model(folder)  # a wrong name is refused before the first model is evaluated
    with together(execution.device), showing():
        for label, folder in zip(named, models, strict=True):
            matcher, workers = opened(folder, execution)
            evaluate_all(label, folder, matcher, workers, execution.batch, every, output.out)
            trust = execution.trust
            named_method = trust.method or trust.named
            execution = replace(execution, trust=Trust(named=named_method, trust_code=trust.trust_code))
        if not is_first():
            return
        _write(suite, data, every, dict(zip(named, models, strict=True)), output)
    if any(one.state == "failed" for one in every):
        raise SystemExit(1)


def _write(suite: Suite, data: Path, every: Sequence[Outcome], folders: Mapping[str, str], output: Output) -> None:
    models = list(folders)
    means = averages(suite, every, models)
    say(*lines(every, means, models))
    if output.json is not None:
        write_json(output.json, as_json(suite, data, every, means))
    if output.csv is not None:
        write_atomic(output.csv, as_csv(every, means, models))
    if output.html is not None:
        facts = made_by(list(folders.values()), str(data))
        write(output.html, signed(report(suite, data, every, means, models), facts))
