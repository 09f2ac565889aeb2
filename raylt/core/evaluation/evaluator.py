"""`Evaluator`: evaluates the models that are due after a step, and computes the metrics for the step's report.

`validate` evaluates models on validation images, which no client trains on. Searches and the choice of a round use its
metrics.
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylt import metrics
from raylt.core.client import Client, Message, Reply
from raylt.core.device import InHalves, all_threads
from raylt.core.evaluation.client_models import (
    Judge,
    ModelTrial,
    NewClient,
    cells_with_own,
    counts_on,
    counts_on_own,
    judged_entries,
    judged_model,
    nan_predictions_on,
    totals_of_each,
)
from raylt.core.evaluation.counts import NO_CLIENT, Counts, CountsByClient, Matrices, counts_of
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import Reduction, each
from raylt.core.method import Method
from raylt.core.report import FRESH, POOLED, SHARED
from raylt.core.server import Server
from raylt.data.images.cache import Mapped, load
from raylt.data.samples import Samples
from raylt.data.splits.split import grouped
from raylt.data.task import Shard, Task
from raylt.errors import RayltError, TooFewReplies
from raylt.models.split import SplitModel
from raylt.seeds import seeded
from raylt.tree import view

# With more clients, only the last evaluation lists metrics by client: for 1,000,000 clients these are 80 MB of JSON.
MAX_LISTED_CLIENTS = 10_000
TRIED_CLIENTS = 3  # clients of which at least one must be able to predict with its own models after the first round
CHANCE = frozenset({"client.late", "client.lost", "device.full"})  # failures of a trial that are no mistake of a method


class Evaluator:
    """Evaluates the global model and the clients' models, on the test set and on the clients' own test images."""

    def __init__(self, method: Method, task: Task, server: Server, fleet: Fleet):
        self.method, self.task, self.server, self.fleet = method, task, server, fleet
        self._config = server.config.evaluation

    def evaluate(self, step: int, last: bool, done: bool) -> tuple[dict[str, Any], Matrices | None]:
        """Evaluate the models that are due after a step.

        Args:
            step: Number of the step.
            last: Whether no round follows.
            done: Whether no step follows.

        Returns:
            Fields of `RoundReport` without those that are None, and the underlying counts; the counts are None if no
            model was evaluated. Metrics on validation images and of new clients are added to `server.figures`.
        """
        with seeded(self.server.config.seed, "evaluation", step, device=self.server.device):  # a model may draw
            return self._evaluate(step, last, done)

    def _evaluate(self, step: int, last: bool, done: bool) -> tuple[dict[str, Any], Matrices | None]:
        own_models = has_own_models(self.method, self.server)
        due = self._global_is_due(step, last)
        shared, of_each_image = self._judge_global(last) if due else (None, {})
        clients = self._judge_clients(self.fleet.everyone) if own_models and self._clients_are_due(step, last) else None
        if self.method.personal and step == 1 and clients is None:
            self._try_client_models()
        deployed = clients if own_models else _as_deployed(shared)

        judged: dict[str, Any] = {}
        if shared is not None:
            judged |= {name: metric(shared.all) for name, metric in SHARED.items()}
            judged |= of_each_image
        if deployed:
            judged |= self._figures(deployed, self.fleet.ids)
            judged["by_client"] = listed_by_client(judged["by_client"], own_models, last)
            judged["shown"] = _shown(judged["clients"]) if own_models else "accuracy"
        if deployed and self.task.validation is not None:
            self.server.figures["validation"] = validate(self.method, self.server, self.fleet, self.task)
        if own_models and done:
            judged["others"] = {name: self._figures_of_other(name) for name in self.method.other_models}
            if self._config.fresh:
                judged["others"] |= self._fresh_figures()
        if done and self.fleet.new_clients:
            self.server.figures["new_clients"] = self._judge_new_clients(None if own_models else deployed)
        if shared is None and clients is None:
            return judged, None

        matrices = Matrices(
            shared=None if shared is None else shared.all,
            clients=CountsByClient(0, {}) if clients is None else clients.clients,
            own=deployed.own if deployed else CountsByClient(0, {}),
        )
        return judged | {"confusion": matrices.sha256}, matrices

    def zero_shot(self, model: SplitModel) -> dict[str, float | None]:
        """Compute the accuracies of an untrained model on the test set: over all classes, and by group of classes."""
        predict = InHalves(model, lambda text: self.fleet.note(f"zero-shot evaluation at the server: {text}"))
        with all_threads(), seeded(self.server.config.seed, "evaluation", 0, device=self.server.device):
            counts = counts_of(predict, self._test, self.task.classes, self._config.batch)
        return {"accuracy": metrics.accuracy(counts.all), **metrics.group_accuracy(counts.all, self.task.groups)}

    def _global_is_due(self, step: int, last: bool) -> bool:
        """Return whether an evaluation of the global model is due.

        The global model cannot be evaluated if it has no running statistics (federation.batchnorm = local), or if
        clients share neither encoder nor classifier, so that it is never trained.
        """
        if self.server.model.local_buffers or not self.trains_global:
            return False
        return last or step % self._config.every == 0

    @cached_property
    def trains_global(self) -> bool:
        """Return whether rounds train the global model: clients share entries of its encoder or classifier."""
        if not self.method.personal:
            return True
        names = self.method.shared(self.server.model)
        return any(name.startswith(("encoder.", "classifier.")) for name in names)

    def _clients_are_due(self, step: int, last: bool) -> bool:
        return last or (self._config.personal > 0 and step % self._config.personal == 0)

    def _judge_global(self, last: bool) -> tuple[Counts, dict[str, Any]]:
        """Return the counts of the global model, and after the last round also `quality` and `answers`."""
        model = self.method.global_model(self.server).eval()
        probabilities: list[Tensor] = []
        predicted: list[Tensor] = []

        def keep(logits: Tensor) -> None:
            probabilities.append(logits.softmax(1).cpu())
            predicted.append(logits.argmax(1).where(~logits.isnan().any(1), -1).cpu())

        with all_threads():
            counts = counts_of(
                in_halves(self.method, model, self.server, self.fleet),
                self._test,
                self.task.classes,
                self._config.batch,
                self._owners,
                keep if last and self.task.kind == "classification" else None,
            )
        self._warn_of_nan_predictions(int(counts.nan_predictions), "the global model")
        if not probabilities:
            return counts, {}
        truth = self._test.y.cpu()
        return counts, {
            "quality": metrics.quality(torch.cat(probabilities), truth),
            "answers": metrics.packed(torch.cat(predicted) == truth),
        }

    def _warn_of_nan_predictions(self, count: int, models: str) -> None:
        """Add a warning to the step's figures if some predictions are NaN."""
        if count:
            text = f"{count} predictions of {models} are not numbers; they count as wrong. Lower local.lr"
            earlier = self.server.figures.get("predictions", text)
            self.server.figures["predictions"] = earlier if text in earlier else f"{earlier}; {text}"

    def _judge_clients(self, cohort: Cohort, other: str | None = None) -> Matrices:
        """Ask clients to evaluate their own models, and return the counts.

        Args:
            cohort: The clients to ask.
            other: The name of one of the method's `other_models`, instead of the model that clients use.
        """
        message: Message = {"model": judged_entries(self.server, self.method)}
        if self._owners is not None:
            message["owners"] = self._owners
        with self.fleet.judging():
            got = self.fleet.ask(
                Judge(self.method, other).judge,
                cohort,
                message,
                confusion=self._counts_reduction,
                not_numbers=nan_predictions_on(self.task.test),
            )
        self._warn_of_nan_predictions(sum(got["not_numbers"].values()), "clients' models")
        return Matrices(None, *_split(got["confusion"], self.task.classes))

    def _try_client_models(self) -> None:
        """Let a client of the first round predict with its own models.

        They are evaluated after the last round, and a mistake of the method would end the run only then. If the first
        client fails, others are asked, since a single client may be hostile.

        Raises:
            TooFewReplies: Several clients failed, and not by chance.
        """
        message = {"model": judged_entries(self.server, self.method)}
        failure = None
        for id in sorted(self.fleet.round_stats.participants or self.fleet.ids)[:TRIED_CLIENTS]:
            try:
                with self.fleet.judging():
                    got = self.fleet.ask(ModelTrial(self.method).try_models, [id], message, not_numbers=each.like(0))
            except TooFewReplies as error:
                failure = failure if error.details.get("cause") in CHANCE else error
                continue
            self._warn_of_nan_predictions(got["not_numbers"][id], "clients' models")
            return
        if failure is not None:
            raise failure

    def _judge_new_clients(self, deployed: Matrices | None) -> dict[str, Any]:
        """Evaluate the clients that join after training, without changing the server or these clients.

        Args:
            deployed: Counts of the model that all clients share; None if clients have models of their own.

        Returns:
            The number of new clients, the mean of each accuracy over them, and the mean of the worst tenth by accuracy
            on their own class mix.
        """
        fleet = self.fleet
        if deployed is None:
            cohort = Cohort(fleet.new_clients, everyone=True)
            with fleet.judging():
                settled = fleet.ask(NewClient(self.method).settle, cohort, self.method.message(self.server))
                deployed = self._judge_clients(Cohort(settled.weights, everyone=True))
        clients = self._figures(deployed, fleet.new_clients)["clients"]
        return {
            "count": len(fleet.new_clients),
            **{kind: spread["mean"] for kind, spread in clients.items()},
            "worst_decile": clients["matched"]["worst_decile"] if "matched" in clients else None,
        }

    def _figures_of_other(self, name: str) -> dict[str, Any]:
        return self._figures(self._judge_clients(self.fleet.everyone, name), self.fleet.ids)

    def _fresh_figures(self) -> dict[str, Any]:
        """Return the metrics of clients' own models after every client has trained once more, as a model "fresh".

        If the training fails, the run ends without them, and the user is told.
        """
        try:
            return {FRESH: self._figures_when_fresh()}
        except RayltError as error:
            self.fleet.note(f"the clients' models after one more training were not evaluated: {error}")
            return {}

    def _figures_when_fresh(self) -> dict[str, Any]:
        """Compute the metrics of clients' own models after every client has trained once more, which is then undone.

        The clients train as in one more round. What they share stays that of the last round. The last phase of a method
        trains every client, so nothing follows it.
        """
        if self.method.finishes:
            return self._figures(self._judge_clients(self.fleet.everyone), self.fleet.ids)
        server = self.server.for_trial_round()
        with self.fleet.judging(server.round):
            self.method.round(server, self.fleet)
            return self._figures(self._judge_clients(self.fleet.everyone), self.fleet.ids)

    def _figures(self, matrices: Matrices, ids: Collection[int]) -> dict[str, Any]:
        """Compute the accuracies and IoU of clients' models, with classes merged that a client does not distinguish.

        The overall metrics of clients' own models are computed from the sum of their counts.

        Args:
            matrices: Confusion matrices of the clients' own models or of the global model.
            ids: The clients that use the global model, if `matrices` has none of their own.
        """
        views, owned = self.task.views, torch.from_numpy(self.task.client_counts)
        counts = matrices.clients or matrices.shared
        assert counts is not None
        seen = metrics.seen_by_each(counts, views, ids)
        own = None
        if self.task.own_tests is not None:
            own = metrics.seen_by_each(matrices.own.of(set(ids)), views, ())
        pooled = metrics.pooled(seen.values())
        by_client = metrics.by_client(seen, owned, own)
        return {
            **{name: metric(pooled) for name, metric in POOLED.items()},
            "groups": metrics.group_accuracy(pooled, self.task.groups),
            "clients": metrics.client_figures(by_client),
            "by_client": by_client,
        }

    @cached_property
    def _test(self) -> Samples:
        return Samples(self.task.test, self.task.spec, self.server.device)

    @cached_property
    def _owners(self) -> Tensor | None:
        """Return the owner (a client id, or NO_CLIENT) of each test image; None if no client owns test images."""
        if self.task.own_tests is None:
            return None
        owners = np.full(len(self.task.test), NO_CLIENT, dtype=np.int64)
        for id, rows in enumerate(self.task.own_tests):
            owners[rows] = id
        return torch.from_numpy(owners)

    @cached_property
    def _counts_reduction(self) -> Reduction:
        """Return the reduction that checks clients' counts against the known totals of the test set."""
        test, classes = self.task.test, self.task.classes
        if self.task.own_tests is None:
            return counts_on(test, classes)
        own = {id: rows for id, rows in enumerate(self.task.own_tests) if len(rows)}
        return counts_on_own(test, classes, totals_of_each(test, classes, own))


def _shown(clients: dict[str, Any]) -> str:
    """Return the name of the accuracy that is displayed for clients' own models."""
    return next((kind for kind in (metrics.LOCAL, "matched") if kind in clients), "accuracy")


def has_own_models(method: Method, server: Server) -> bool:
    """Return whether clients are evaluated with models of their own."""
    return method.personal or bool(server.model.local_buffers)


def listed_by_client(
    by_client: dict[str, list[float | None]], own_models: bool, last: bool
) -> dict[str, list[float | None]] | None:
    """Return each client's metrics if the evaluation's line in metrics.jsonl has them, else None.

    Args:
        own_models: Whether clients are evaluated with models of their own.
        last: Whether the evaluation is the last one.
    """
    few = all(len(values) <= MAX_LISTED_CLIENTS for values in by_client.values())
    return by_client if last or (own_models and few) else None


def in_halves(method: Method, model: SplitModel, server: Server, fleet: Fleet) -> InHalves:
    """Return a model's prediction function, which uses smaller batches after the server's device ran out of memory."""
    return InHalves(
        lambda x: method.predict(model, x),
        lambda text: fleet.note(f"round {server.round}, evaluation at the server: {text}"),
    )


def validate(method: Method, server: Server, fleet: Fleet, task: Task) -> dict[str, float | None]:
    """Compute the accuracies and mean IoU on the validation set, with equal weights for all classes.

    Args:
        method: The method.
        server: The server, with the global model.
        fleet: The clients.
        task: The data, with a validation set.

    Returns:
        accuracy, many, medium, few, owned, matched, miou, local and worst_decile, in [0, 1]; None if there is nothing
        to evaluate. `local` is the mean over clients on the validation images that were taken from each client, and
        `worst_decile` the mean of the worst tenth of these clients.
    """
    shard = task.validation
    owners = task.validation_clients
    assert shard is not None
    assert owners is not None
    if has_own_models(method, server):
        message = {"model": judged_entries(server, method), "judged": _as_message(shard), "owners": view(owners)}
        ids = np.unique(owners)
        taken = totals_of_each(shard, task.classes, dict(zip(ids.tolist(), grouped(owners, ids), strict=True)))
        reduction = counts_on_own(shard, task.classes, taken)
        with fleet.judging():
            got = fleet.ask(ValidationJudge(method).judge, fleet.everyone, message, confusion=reduction)
        on_all, own = _split(got["confusion"], task.classes)
        judged = metrics.Computed(on_all, lambda id: balance(on_all[id]))
    else:
        model = method.global_model(server).eval()
        samples = Samples(shard, task.spec, server.device)
        predict = in_halves(method, model, server, fleet)
        counts = counts_of(predict, samples, task.classes, server.config.evaluation.batch, torch.from_numpy(owners))
        judged = balance(counts.all)
        own = counts.own
    seen = metrics.seen_by_each(judged, task.views, fleet.ids)
    pooled = sum(seen.values(), start=torch.zeros_like(next(iter(seen.values()))))
    own_seen = metrics.seen_by_each(own.of(set(fleet.ids)), task.views, ())
    clients = metrics.client_figures(metrics.by_client(seen, torch.from_numpy(task.client_counts), own_seen))
    return {
        "accuracy": metrics.accuracy(pooled),
        **metrics.group_accuracy(pooled, task.groups),
        "owned": clients["owned"]["mean"],
        "matched": clients["matched"]["mean"],
        "miou": metrics.mean_iou(pooled),
        "local": clients[metrics.LOCAL]["mean"] if metrics.LOCAL in clients else None,
        "worst_decile": clients[metrics.LOCAL]["worst_decile"] if metrics.LOCAL in clients else None,
    }


@dataclass(frozen=True)
class ValidationJudge:
    """The client function that evaluates clients' own models on validation images."""

    method: Method

    def judge(self, client: Client, message: Message) -> Reply:
        """Count the pairs (true class, predicted class) of this client's model on the images in the message.

        The reply has the nonzero cells of these counts, each with the count on the images taken from this client.
        """
        model = judged_model(self.method, client, message["model"]).eval()
        images = message["judged"]
        samples = copy.copy(client.samples)  # normalise as the client's own samples
        samples.y = images["labels"]
        if "images" in images:
            samples.x = images["images"]
        else:
            samples.x = view(Mapped(images["path"], images["rows"].cpu().numpy()).load()).to(client.device)
        batch = client.config.evaluation.batch
        owners = message["owners"]
        taken = owners.where(owners == client.id, NO_CLIENT)
        counts = counts_of(lambda x: self.method.predict(model, x), samples, client.model.classes, batch, taken)
        return client.reply(confusion=cells_with_own(counts, client.id))


def balance(matrix: Tensor) -> Tensor:
    """Weight the rows of a confusion matrix as if every class had the same number of samples.

    Returns:
        float64 [C, C]; rows of absent classes stay 0.
    """
    return matrix.double() / matrix.sum(dim=1, keepdim=True).clamp(min=1)


def _split(cells: Mapping[int, Tensor], classes: int) -> tuple[CountsByClient, CountsByClient]:
    """Split clients' counts into the counts on all images and the counts on each client's own images.

    Args:
        cells: Nonzero cells of each client, [m, 2], or [m, 3] with the counts on its own images; see `cells_of`.
    """
    on_all = {id: both[:, :2].clone() for id, both in cells.items()}
    own = {id: both[both[:, 2] > 0][:, ::2].clone() for id, both in cells.items() if both.shape[1] == 3}
    return CountsByClient(classes, on_all), CountsByClient(classes, {id: some for id, some in own.items() if len(some)})


def _as_message(shard: Shard) -> dict[str, Any]:
    """Return images and labels in the form that a message carries.

    Memory-mapped images are sent as a file path with rows, other images as tensors.
    """
    if isinstance(shard.x, Mapped):
        return {"path": shard.x.path, "rows": view(shard.x.rows), "labels": view(shard.labels())}
    return {"images": view(load(shard.x)), "labels": view(shard.labels())}


def _as_deployed(shared: Counts | None) -> Matrices | None:
    """Return the global model's confusion matrices, which all clients share, or None without counts."""
    return None if shared is None else Matrices(shared.all, own=shared.own)
