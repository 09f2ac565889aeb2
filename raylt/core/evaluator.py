"""`Evaluator`: who is judged when, and what a report says of it."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylt import metrics
from raylt.core.client import Message
from raylt.core.cohort import Cohort
from raylt.core.confusions import Matrices
from raylt.core.evaluation import NOBODY, Counts, counts_of
from raylt.core.fleet import Fleet
from raylt.core.judging import Judge, Newcomer, counts_on, counts_on_own, judged_entries, totals
from raylt.core.method import Method
from raylt.core.reductions import Reduction
from raylt.core.server import Server
from raylt.core.validation import has_own_models, in_halves, validate
from raylt.data.samples import Samples
from raylt.data.task import Task

EMPTY = ("accuracy", "global_accuracy", "global_macro", "global_miou", "macro", "miou", "groups", "clients",
         "by_client", "others", "quality", "confusion")


class Evaluator:
    """Judges the global model and those of clients, on the test set and on the clients' own parts of it."""

    def __init__(self, method: Method, task: Task, server: Server, fleet: Fleet):
        self.method, self.task, self.server, self.fleet = method, task, server, fleet
        self._config = server.config.evaluation

    def evaluate(self, step: int, last: bool, done: bool) -> tuple[dict[str, Any], Matrices | None]:
        """What is due after a step.

        Args:
            last: whether there are no more rounds; done: nor anything else.

        Returns:
            Fields of the report, all of EMPTY, and the counts behind them; None where nothing was judged.
        """
        judged: dict[str, Any] = dict.fromkeys(EMPTY)
        personal = has_own_models(self.method, self.server)
        shared, of_clients = None, None
        # a global model without running statistics (federation.batchnorm = local) cannot be judged
        if (last or step % self._config.every == 0) and not self.server.model.stays:
            shared, judged["quality"] = self._judge_global(last)
            judged["global_accuracy"] = metrics.accuracy(shared.all)
            judged["global_macro"], judged["global_miou"] = metrics.macro(shared.all), metrics.mean_iou(shared.all)
        if personal:
            due = last or (self._config.personal > 0 and step % self._config.personal == 0)
            of_clients = self._judge_clients(self.fleet.everyone) if due else None
        seen = of_clients or (None if personal or shared is None else Matrices(shared.all, own=shared.own))
        if seen is not None:
            judged |= self._figures(seen, self.fleet.ids)
            if not (personal or last):
                judged["by_client"] = None
            if self.task.validation is not None:
                self.server.figures["validation"] = validate(self.method, self.server, self.fleet, self.task)
        if personal and done:
            judged["others"] = {name: self._figures(self._judge_clients(self.fleet.everyone, name), self.fleet.ids)
                                for name in self.method.other_models}
        if done and self.fleet.newcomers:
            self.server.figures["new_clients"] = self._newcomers(None if personal else seen)
        if shared is None and of_clients is None:
            return judged, None
        matrices = Matrices(None if shared is None else shared.all, {} if of_clients is None else of_clients.clients,
                            {} if seen is None else seen.own)
        judged["confusion"] = matrices.sha256
        return judged, matrices

    def _newcomers(self, seen: Matrices | None) -> dict[str, Any]:
        """Figures of the clients that join now: count, means over them, and the worst tenth by their own class mix.

        Nothing of it stays, at the server or at them.

        Args:
            seen: of the one model that all clients use; None where they have models of their own.
        """
        fleet = self.fleet
        if seen is None:
            with fleet.judging():
                settled = fleet.ask(Newcomer(self.method).settle, Cohort(fleet.newcomers, everyone=True),
                                    self.method.message(self.server))
                seen = self._judge_clients(Cohort(settled.weights, everyone=True))
            del fleet.ledger.traffic["settle"]          # no part of training
        each = self._figures(seen, fleet.newcomers)["clients"]
        return {"count": len(fleet.newcomers), **{kind: spread["mean"] for kind, spread in each.items()},
                "worst_decile": each["matched"]["worst_decile"] if "matched" in each else None}

    def _figures(self, matrices: Matrices, ids: Collection[int]) -> dict[str, Any]:
        """What is read off the counts of each client's own model, or of one that all share, as each sees the classes.

        Of clients' own models the overall figures are those of their counts put together.

        Args:
            ids: of the clients that it is about.
        """
        views, owned = torch.from_numpy(self.task.views), torch.from_numpy(self.task.client_counts)
        about = set(ids)
        everyone = matrices.clients or matrices.shared
        assert everyone is not None
        seen = metrics.seen_by_each(everyone, views, ids)
        own = None if self.task.own_tests is None else metrics.seen_by_each(
            {id: matrix for id, matrix in matrices.own.items() if id in about}, views, ())
        pooled = sum(seen.values(), start=torch.zeros_like(next(iter(seen.values()))))
        by_client = metrics.by_client(seen, owned, own)
        return {"accuracy": metrics.accuracy(pooled), "macro": metrics.macro(pooled),
                "miou": metrics.mean_iou(pooled), "groups": metrics.group_accuracy(pooled, self.task.groups),
                "clients": metrics.client_figures(by_client), "by_client": by_client}

    @cached_property
    def _test(self) -> Samples:
        return Samples(self.task.test, self.task.facts, self.server.device)

    @cached_property
    def _owners(self) -> Tensor | None:
        """The client of each test image, or NOBODY; None where clients have none."""
        if self.task.own_tests is None:
            return None
        owners = np.full(len(self.task.test), NOBODY, dtype=np.int64)
        for id, rows in enumerate(self.task.own_tests):
            owners[rows] = id
        return torch.from_numpy(owners)

    def _judge_global(self, last: bool) -> tuple[Counts, dict[str, float | None] | None]:
        """Its counts, and after the last round of what worth its probabilities are."""
        model, shares = self.method.global_model(self.server).eval(), []

        def keep(logits: Tensor) -> None:
            shares.append(logits.softmax(1).cpu())

        with _all_threads():
            counts = counts_of(in_halves(self.method, model, self.server, self.fleet), self._test, self.task.classes,
                               self._config.batch, self._owners,
                               keep if last and self.task.kind == "classification" else None)
        return counts, metrics.quality(torch.cat(shares), self._test.y.cpu()) if shares else None

    @cached_property
    def _expected(self) -> Reduction:
        test, classes = self.task.test, self.task.classes
        if self.task.own_tests is None:
            return counts_on(test, classes)
        own = {id: totals(test, classes, rows) for id, rows in enumerate(self.task.own_tests) if len(rows)}
        return counts_on_own(test, classes, own)

    def _judge_clients(self, cohort: Cohort, other: str | None = None) -> Matrices:
        message: Message = {"model": judged_entries(self.server, self.method)}
        if self._owners is not None:
            message["owners"] = self._owners
        with self.fleet.judging():
            got = self.fleet.ask(Judge(self.method, other).judge, cohort, message, confusion=self._expected)
        del self.fleet.ledger.traffic["judge"]      # no federation would send these: they are for our eyes
        counts: dict[int, Tensor] = got["confusion"]
        if self.task.own_tests is None:
            return Matrices(clients=counts)
        return Matrices(clients={id: both[0] for id, both in counts.items()},
                        own={id: both[1] for id, both in counts.items() if both[1].any()})


@contextmanager
def _all_threads() -> Iterator[None]:
    """All cores: clients are idle during an evaluation, and it decides counts, not weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
