"""How a run is judged on validation images, which no client trains on: what a search and a choice of round go by."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raylt import metrics
from raylt.core.client import Client, Message, Reply
from raylt.core.evaluation import confusion_of
from raylt.core.fleet import Fleet
from raylt.core.full import InHalves
from raylt.core.judging import counts_on, judged_entries, judged_model
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.data.cache import Mapped, load
from raylt.data.samples import Samples
from raylt.data.task import Shard, Task
from raylt.models.split import SplitModel
from raylt.tree import view


def validate(method: Method, server: Server, fleet: Fleet, task: Task) -> dict[str, float | None]:
    """Figures on the validation set, each class counting the same, as on the balanced test set.

    Returns:
        accuracy, many, medium, few, owned, matched and miou, in [0, 1]; None where there is nothing to judge.
    """
    shard = task.validation
    assert shard is not None
    if has_own_models(method, server):
        message = {"model": judged_entries(server, method), "judged": _parcel(shard)}
        with fleet.judging():
            got = fleet.ask(ValidationJudge(method).judge, fleet.everyone, message,
                            confusion=counts_on(shard, task.classes))
        del fleet.ledger.traffic["judge"]       # no federation would send these: they are for our eyes
        judged = {id: balance(matrix) for id, matrix in got["confusion"].items()}
    else:
        model = method.global_model(server).eval()
        samples, answers = Samples(shard, task.facts, server.device), in_halves(method, model, server, fleet)
        judged = balance(confusion_of(answers, samples, task.classes, server.config.evaluation.batch))
    seen = metrics.seen_by_each(judged, torch.from_numpy(task.views), fleet.ids)
    pooled = sum(seen.values(), start=torch.zeros_like(next(iter(seen.values()))))
    clients = metrics.client_figures(metrics.by_client(seen, torch.from_numpy(task.client_counts)))
    return {"accuracy": metrics.accuracy(pooled), **metrics.group_accuracy(pooled, task.groups),
            "owned": clients["owned"]["mean"], "matched": clients["matched"]["mean"], "miou": metrics.mean_iou(pooled)}


def in_halves(method: Method, model: SplitModel, server: Server, fleet: Fleet) -> InHalves:
    """A model's answers, for as many images at a time as the server's device has room for."""
    return InHalves(lambda x: method.predict(model, x),
                    lambda text: fleet.note(f"round {server.round}, evaluation at the server: {text}"))


def has_own_models(method: Method, server: Server) -> bool:
    """Whether clients are judged by models of their own."""
    return method.personal or bool(server.model.stays)


@dataclass(frozen=True)
class ValidationJudge:
    """The client function that judges clients' own models on validation images."""

    method: Method

    def judge(self, client: Client, message: Message) -> Reply:
        """Counts [C, C] of (true, predicted) classes of this client's model on the images that the message brought."""
        model, parcel = judged_model(self.method, client, message["model"]).eval(), message["judged"]
        samples = copy.copy(client.samples)             # normalised as its own
        samples.y = parcel["labels"]
        samples.x = parcel["images"] if "images" in parcel else view(
            Mapped(parcel["path"], parcel["rows"].cpu().numpy()).load()).to(client.device)
        return client.reply(confusion=confusion_of(lambda x: self.method.predict(model, x), samples,
                                                   client.model.classes, client.config.evaluation.batch))


def balance(matrix: Tensor) -> Tensor:
    """A confusion matrix as if every class had the same number of samples, float64 [C, C]; absent classes stay 0."""
    return matrix.double() / matrix.sum(dim=1, keepdim=True).clamp(min=1)


def _parcel(shard: Shard) -> dict[str, Any]:
    images = ({"path": shard.x.path, "rows": view(shard.x.rows)} if isinstance(shard.x, Mapped)
              else {"images": view(load(shard.x))})
    return images | {"labels": view(shard.labels())}
