"""The rows of BPFed's Table 4, with FedAvg and FedPer, over one split: accuracy on the classes that a client owns.

    python benchmarks/bpfed_rows.py raylt/recipes/bpfed/cifar10_if50_alpha0.5_k20.yaml [SETTING=VALUE ...] --out FOLDER

Rows that differ only in the second stage take it from the same first stage, so a table costs three runs, not seven:
FedAvg, and BPFed without and with Mixup. FedPer is the first stage without Mixup. Its classifiers begin from weights of
their own here, as BPFed's do, and not from common ones.

Prints a line per row: mean, standard deviation and mean of the worst tenth over clients, and the mean without those of
at most two classes, whom smoothing may leave with nothing to tell; writes the figures of every client to
FOLDER/STAGE.json, one file for each first stage; a stage whose file is there is not run again.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from raylt import metrics
from raylt.config import load
from raylt.core.client import Client
from raylt.core.evaluation import confusion_of
from raylt.core.experiment import Experiment
from raylt.core.features import features
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.core.judging import Judge, judged_entries
from raylt.core.reductions import each
from raylt.data.samples import Samples
from raylt.data.task import build_task
from raylt.errors import RayltError
from raylt.methods import make_method
from raylt.methods.bpfed import method as bpfed
from raylt.registry import resolve

PLAIN = {"fa": False, "loss": "ce"}
# first stages, and the second stages that follow each; the order is that of Table 4
STAGES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "fedavg": ({"name": "fedavg"}, {"FedAvg": {}}),
    "plain": ({"name": "bpfed", "alpha": 0.0}, {"FedPer": {"crt": False, "lws": False}, "CRT": PLAIN,
                                                "CRT FA": {"loss": "ce"}, "CRT FA LS": {}}),
    "mixup": ({"name": "bpfed"}, {"Mixup": {"crt": False, "lws": False}, "Mixup CRT": PLAIN,
                                  "Mixup CRT FA": {"loss": "ce"}, "Mixup CRT FA LS(all)": {"loss": "ls_all"},
                                  "Mixup CRT FA LS": {}, "Mixup CRT FA, E 20": {"loss": "ce", "epochs": 20},
                                  "Mixup CRT FA LS, E 20": {"epochs": 20}}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=STAGES, help="only this one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for stage in [arguments.stage] if arguments.stage else STAGES:
        file = arguments.out / f"{stage}.json"
        if not file.exists():
            rows = measure(stage, arguments.recipe, arguments.settings)
            file.write_text(json.dumps(rows, indent=1))
        show(json.loads(file.read_text()))


def measure(stage: str, recipe: Path, settings: list[str]) -> dict[str, dict[str, Any]]:
    """The accuracies of each row of a stage, by client."""
    first, rows = STAGES[stage]
    config = load(recipe, settings)
    rounds = config.federation.rounds
    # a round more than is taken: the last one judges every client by itself, its encoder on all test images
    federation = config.federation.model_copy(update={"rounds": rounds + 1})
    evaluation = config.evaluation.model_copy(update={"every": rounds + 1, "personal": 0})
    config = config.model_copy(update={"method": first, "federation": federation, "evaluation": evaluation})
    task, device = build_task(config.data), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setup = resolve(config)
    fleet = LocalFleet(config, task, Host(setup, task.facts, task.test, device))
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(setup, task, fleet, device, Path(folder))
        for _ in range(rounds):
            report = experiment.step()
            print(f"{stage} {report.step}/{rounds}  {report.figures}  {report.seconds:.1f} s", flush=True)
        bpfed.features = once()             # the encoder is the same for all rows
        for name, second in rows.items():
            start = time.perf_counter()
            experiment.method = make_method(first | second)
            # a row without a second stage is judged as the first left it
            with experiment.rehearsal() if experiment.method.finishes else fleet.rehearsing():
                said, matrices = dict(experiment.server.figures), judged(experiment)
            by_client = metrics.by_client(matrices, torch.from_numpy(task.client_counts))
            figures[name] = {"figures": said, "seconds": time.perf_counter() - start, **by_client,
                             "classes": (task.client_counts > 0).sum(1).tolist()}
    return figures


def once() -> Callable[[Client], tuple[Tensor, Tensor]]:
    """`raylt.core.features`, computed once for each client."""
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def remembered(client: Client) -> tuple[Tensor, Tensor]:
        if client.id not in known:
            known[client.id] = features(client)
        return known[client.id]

    return remembered


def judged(experiment: Experiment) -> dict[int, Tensor]:
    """The confusion matrix of each client's model on the test set."""
    server, fleet, task, method = experiment.server, experiment.fleet, experiment.task, experiment.method
    if method.personal:
        message = {"model": judged_entries(server, method)}
        return fleet.ask(Judge(method).judge, fleet.everyone, message, confusion=each)["confusion"]
    matrix = confusion_of(server.model.eval(), Samples(task.test, task.facts, server.device), task.classes,
                          experiment.config.evaluation.batch)
    return dict.fromkeys(fleet.ids, matrix)


def show(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        owned = [100 * value for value in row["owned"] if value is not None]
        others = [100 * value for value, classes in zip(row["owned"], row["classes"], strict=True)
                  if value is not None and classes > 2]
        print(f"{name:28s} owned {fmean(owned):6.2f}  sd {pstdev(owned):5.2f}  worst tenth "
              f"{metrics.worst_decile(owned):6.2f}  more than two classes {fmean(others):6.2f} (of {len(others)})  "
              f"matched {100 * fmean(row['matched']):6.2f}")


if __name__ == "__main__":
    try:
        main()
    except RayltError as error:
        raise SystemExit(f"error: {error}") from None
