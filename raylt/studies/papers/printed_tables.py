"""The cells of the papers' printed tables as data, each with the settings of the corresponding run.

papers.csv contains the figures, one row per printed cell, with known misprints in the column `note`. This module
converts a row to a run: the recipe of its setting and the settings of its method. If a row cannot be run, it gives the
reason, which is usually a method that raylt does not have.
"""

import csv
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from raylt.config import Config, completed, recipes
from raylt.methods import METHODS, make_method
from raylt.studies.analysis.measures import At
from raylt.studies.settings import merge, read_recipe, resolved

PAPERS = {
    "SFD": "SFD, KDD 2025; mean of 3 runs",
    "FedSM": "FedSM (semantic mixup), IoT-J 2026 and AAAI 2026; mean of 5 runs, of 3 on ImageNet-LT",
    "MuPFL": "MuPFL; number of runs not stated",
    "BPFed": "BPFed; number of runs not stated",
}
# The code of FedSM's authors reports the best round on the test set. The other papers state or suggest the last round.
_AT: dict[str, At] = {"FedSM": "best"}
_MEASURES = {
    "acc_top1": "accuracy",
    "acc_top1_overall": "accuracy",
    "acc_top1_many": "many",
    "acc_top1_medium": "medium",
    "acc_top1_few": "few",
    "mean_client_acc": "matched",
    "mean_client_owned_class_acc": "owned",
    # Cityscapes: figures of the global model. The figures printed as mAcc are aAcc in FedSeg's log.
    "mIoU": "global_miou",
    "mAcc": "global_accuracy",
}
_SOURCES = {
    "cifar10_lt": "cifar10",
    "cifar100_lt": "cifar100",
    "cinic10_lt": "cinic10",
    "fmnist_lt": "fashion_mnist",
    "imagenet_lt": "imagenet_lt",
    "cityscapes": "cityscapes",
}
# Fields of the rows that are a variant of the paper's own method.
_ROWS: dict[str, dict[str, Any]] = {
    "SFD-CE": {"abbl": "ce"},
    "SFD-LA": {"abbl": "la"},
    "SFD w/o improved pi": {"beta_pi": 0},
    "SFD w/o Delta in A-SCL": {"delta": "none", "scl_self": False},
    "SFD w/o SAFS and fine-tune": {"safs": False},
    "SFD w/o MeanCov aligner": {"aligner": False},
    "SFD w/o L_MMD": {"mmd": False},
    "SFD w/o L_ARR": {"arr": False},
    "FedSM+CLIP": {},
    "FedSM+MetaCLIP": {"teacher": "ViT-B-32/metaclip_400m"},
    "FedSM probabilistic SR": {},
    "FedSM deterministic SR": {"partner": "deterministic"},
    "FedSM w/o SR": {"partner": "random"},
    "FedSM w/o CLIP fine-tuning": {},
    "FedSM w/ CLIP fine-tuning": {"finetune": True, "teacher_trains": "encoder"},
    "MuPFL[BAVD]": {"acmu": False, "pkcf": False},
    "MuPFL[ACMU]": {"bavd": False, "pkcf": False},
    "MuPFL[PKCF]": {"bavd": False, "acmu": False},
    "MuPFL[BAVD+ACMU]": {"pkcf": False},
    "MuPFL[ACMU+PKCF]": {"bavd": False},
    "MuPFL[BAVD+PKCF]": {"acmu": False},
    "MuPFL[BAVD+ACMU+PKCF]": {},
    "BPFed[no mixup, no FA, CE]": {"alpha": 0, "fa": False, "loss": "ce"},
    "BPFed[mixup, no FA, CE]": {"fa": False, "loss": "ce"},
    "BPFed[mixup, FA, CE]": {"loss": "ce"},
    "BPFed[mixup, FA, LS all classes]": {"loss": "ls_all"},
    "BPFed[mixup, FA, LS owned classes]": {},
    "BPFed[mixup alpha=0]": {"alpha": 0},
}
# Ablation rows. The two rows of FedSM with different teachers are the paper's main results, not ablations.
_ABLATIONS = _ROWS.keys() - {"FedSM+CLIP", "FedSM+MetaCLIP"}
_BASES = {"FedSM w/ CLIP fine-tuning": ("FedSM w/o CLIP fine-tuning",)}
_FIELDS: dict[str, dict[str, Any]] = {"FedProx": {"mu": 0.01}}  # no paper states mu
# Personal methods of which tables of global models show the generic classifier, as SFD states in appendix C.
_GENERIC = ("FedRoD", "FedLoGe")
_SETTINGS: dict[str, dict[str, Any]] = {"RatioLoss": {"data.auxiliary": 63}}  # samples per class, as in its code
_UNCLEAR = {"FedAvg with clustering": "the paper does not say what FedAvg with clustering does with its clusters"}


@dataclass(frozen=True)
class Expectation:
    """A cell of a paper's table, with the value that a reproduction should reach.

    Attributes:
        number: Row in papers.csv, from 1.
        method: Printed label of the row.
        value: Printed value, in [0, 1].
        std: Printed standard deviation, in the unit of `value`; None if none is printed.
        setting: Data set and parameters, by the papers' letters.
        note: Misprints and inferred values; empty for most cells.
        measure: Measure that the cell prints.
        at: Rounds whose values are compared.
        recipe: Name of the setting's recipe.
        changes: Settings of the row, which override those of the recipe.
        problem: Reason why the cell cannot be run; None if it can.
        ablation: Whether the row is the paper's method with parts removed or fixed. Such a row is judged by its
            difference to its base, because several rows of a table have similar values.
    """

    number: int
    paper: str
    table: str
    method: str
    value: float
    std: float | None
    setting: dict[str, str]
    note: str
    measure: str
    at: At
    recipe: str
    changes: dict[str, Any]
    problem: str | None
    ablation: bool

    @property
    def cell(self) -> str:
        """The setting in words, such as "cifar10, IF 100, alpha 0.5, K 20"."""
        words = [f"{key} {value}" for key, value in self.setting.items() if key not in ("dataset", "r")]
        return ", ".join([self.setting["dataset"], *words])

    @property
    def arm(self) -> str:
        """The label of the method in the table, with the parameters that this row fixes, such as lambda."""
        more = {key: value for key, value in self.setting.items() if key in ("lambda", "clusters", "E")}
        return " ".join([self.method, *(f"{key}={value}" for key, value in more.items())])

    def config(self) -> Config:
        """Return the settings of the corresponding run, with seed 0 and all fields of its method."""
        assert self.problem is None
        return resolved(merge(_recipe(self.recipe), self.changes))

    def identity(self) -> str:
        """Return the hash that all runs of this cell share; seed, number of rounds and paths do not affect it."""
        return _identity_of(self.number)


@cache
def expectations() -> tuple[Expectation, ...]:
    """Return all cells of the papers' tables, in the order of the file papers.csv."""
    with (Path(__file__).with_name("papers.csv")).open(newline="") as stream:
        return tuple(_expectation(number, row) for number, row in enumerate(csv.DictReader(stream), 1))


def base_of(cell: Expectation) -> Expectation | None:
    """Return the cell to which a cell is compared: that of FedAvg with the same setting and measure.

    A cell from the same table is preferred. The base of FedSM with CLIP fine-tuned is FedSM itself, as in the paper's
    text on Table IV. Return None for FedAvg itself, and if the paper does not print this value.
    """

    def setting(each: Expectation) -> tuple[Any, ...]:
        fixed = {key: value for key, value in each.setting.items() if key not in ("lambda", "clusters")}
        # `global_accuracy` of a generic classifier corresponds to `accuracy` of FedAvg, which has one model only
        return each.paper, each.measure.removeprefix("global_"), tuple(sorted(fixed.items()))

    if cell.method.startswith("FedAvg"):
        return None
    names = _BASES.get(cell.method, ("FedAvg", "FedAvg w/o clustering"))
    bases = [
        each
        for each in expectations()
        if each.method in names and each.problem is None and setting(each) == setting(cell)
    ]
    of_table = [each for each in bases if each.table == cell.table]
    return next(iter([*of_table, *bases]), None)


def identity(config: Mapping[str, Any]) -> str:
    """Return a hash over the settings except seeds, number of rounds, paths, precision and resources.

    No paper states its precision, and PyTorch's own default on a GPU is partly tf32.

    Args:
        config: Content of config.yaml. Settings and method fields that are missing in older files have their defaults.
    """
    tree = json.loads(json.dumps(completed(config)))
    if tree["method"]["name"] in METHODS:
        method = make_method(tree["method"])
        tree["method"] = {"name": method.name, **method.model_dump(mode="json")}
    for key in ("resources", "output", "evaluation"):
        tree.pop(key, None)
    tree.pop("seed", None)
    tree["federation"].pop("rounds", None)
    tree["local"].pop("precision", None)
    for key in ("seed", "root", "download", "split"):
        tree["data"].pop(key, None)
    return hashlib.sha256(json.dumps(_numbers(tree), sort_keys=True).encode()).hexdigest()


@cache
def _recipe_names() -> frozenset[str]:
    return frozenset(recipes())


@cache
def _identity_of(number: int) -> str:
    return identity(expectations()[number - 1].config().model_dump(mode="json"))


@cache
def _recipe(name: str) -> dict[str, Any]:
    return read_recipe(name)


def _expectation(number: int, row: dict[str, str]) -> Expectation:
    row = _corrected(row)
    setting = {"dataset": _SOURCES[row["dataset"]]}
    for column, letter in (
        ("IF", "IF"),
        ("alpha", "alpha"),
        ("beta", "beta"),
        ("K", "K"),
        ("participation", "r"),
        ("lam", "lambda"),
        ("clusters", "clusters"),
        ("epochs", "E"),
    ):
        if row[column]:
            setting[letter] = row[column]
    changes, problem = _changes(row)
    recipe = _recipe_of(row)
    measure = _MEASURES[row["metric"]]
    if measure == "accuracy" and row["method"] in _GENERIC:
        measure = "global_accuracy"
    if problem is None and recipe not in _recipe_names():
        problem = f"there is no recipe {recipe}"
    return Expectation(
        number,
        row["paper"],
        row["table"],
        row["method"],
        float(row["value"]) / 100,
        float(row["std"]) / 100 if row["std"] else None,
        setting,
        row["note"],
        measure,
        _AT.get(row["paper"], "last"),
        recipe,
        changes,
        problem,
        row["method"] in _ABLATIONS or bool(row["lam"]) or "kappa" in changes.get("method", {}),
    )


def _corrected(row: dict[str, str]) -> dict[str, str]:
    """Return a row of papers.csv with corrected settings, where the paper's heading is wrong or missing.

    The two IF headings of MuPFL's Table 2 are assumed to be swapped. It then agrees with the captions of Tables 5 and
    6, and with Figs. 6 and 8, which count rounds to 70 % at IF 10. Table 1 repeats figures of Table 2 without settings.
    """
    if row["paper"] == "MuPFL" and row["table"] == "2":
        return row | {"IF": {"10": "100", "100": "10"}[row["IF"]]}
    if row["paper"] == "MuPFL" and row["table"] == "1":
        return row | {"IF": "100", "alpha": "1.0" if row["method"] == "MuPFL" else "0.5"}
    return row


def _recipe_of(row: dict[str, str]) -> str:
    source = _SOURCES[row["dataset"]]
    folder = row["paper"].lower()
    if source == "cityscapes":
        return f"mupfl/segmentation/cityscapes_if{row['IF']}_beta{row['beta']}"
    imbalance = f"_if{row['IF']}" if row["IF"] else ""
    return f"{folder}/{source}{imbalance}_alpha{row['alpha']}_k{row['K']}"


def _changes(row: dict[str, str]) -> tuple[dict[str, Any], str | None]:
    """Return a row's changes to the recipe's settings, and the reason why the row cannot be run (None if it can)."""
    label = row["method"]
    paper = row["paper"]
    changes: dict[str, Any] = {}
    if label in _UNCLEAR:
        return {}, _UNCLEAR[label]
    if label in _ROWS or label == paper:
        fields = dict(_ROWS.get(label, {}))
        if row["lam"]:
            fields |= {"lam_low": float(row["lam"]), "lam_high": float(row["lam"])}
        if row["clusters"].isdecimal():
            fields["kappa"] = int(row["clusters"])
        if fields:
            changes["method"] = fields
    else:
        name = {"FedAvg w/o clustering": "fedavg"}.get(label, label.lower().replace("-", "").replace(" ", ""))
        if name not in METHODS:
            return {}, f"raylt has no method {name}"
        if row["dataset"] == "cityscapes" and "segmentation" not in METHODS[name].problems:
            return {}, f"{name} is not defined for label maps here"
        changes |= {"method": {"name": name, **_FIELDS.get(label, {})}, **_SETTINGS.get(label, {})}
        if paper == "FedSM" and name != "clip2fl":  # only FedSM and CLIP2FL have the recipe's projection
            changes["model"] = "resnet50" if row["dataset"] == "imagenet_lt" else "resnet8"
    if row["epochs"]:
        changes["local.epochs"] = int(row["epochs"])
    return changes, None


def _numbers(tree: Any) -> Any:
    """Return settings with every integer converted to a float, so that 1 and 1.0 hash alike."""
    if isinstance(tree, dict):
        return {key: _numbers(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_numbers(value) for value in tree]
    return float(tree) if isinstance(tree, int) and not isinstance(tree, bool) else tree
