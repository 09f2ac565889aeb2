"""FEDIC: FedAvg whose global model is distilled from a calibrated ensemble of the clients' models (Shang et al., ICME
2022).

Privileged: the server has labelled images of every class (`data.auxiliary`), which most federations do not have, and
sees each client's model. The steps follow the authors' code, shangxinyi/FEDIC at 4fce882, with departures:
[1] The code distils on unlabelled images of another data set. Here the same labelled images are used, and each batch
    serves both terms.
[2] Images at the server are not augmented, so clients' logits and features of them are computed once per round.
[3] Adam is reset in each round; the ensemble's weights are kept, as in the code.
[4] The divergence has no factor T^2, as in the code.
[5] The gate starts at 1/2 everywhere; the code draws its weights.
"""

import copy
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.config import Config
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import each, mean
from raylt.core.method import Group, Method
from raylt.core.server import Server
from raylt.core.training.optimisers import Adam
from raylt.data.samples import Samples
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.models.split import SplitModel, load_entries, with_entries
from raylt.ops.distillation import divergence
from raylt.ops.local_updates import check_averaged_statistics


class FEDIC(Method):
    """FedAvg, then fine-tuning, calibration and distillation on the server's images."""

    name: ClassVar[str] = "fedic"
    paper: ClassVar[str] = "Shang et al., ICME 2022"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2205.00172"
    group: ClassVar[Group | None] = "aggregation"
    privileged: ClassVar[str | None] = "labelled images of every class at the server (data.auxiliary)"
    stackable: ClassVar[bool] = True

    steps: int = hp(100, Choice(20, 50, 100), "steps of each of the three trainings; from the code", ge=1)
    distil_batch: int = hp(20, Choice(20, 64, 128), "images in a step; from the code", ge=2)
    distil_lr: float = hp(0.001, LogUniform(1e-4, 0.01), "learning rate of Adam; from the code", gt=0)
    weight: float = hp(
        0.5, Uniform(0.0, 1.0), "weight of the distillation relative to the labels; from the code", ge=0, le=1
    )
    temperature: float = hp(2.0, Choice(1.0, 2.0, 4.0), "temperature T of the distillation; from the code", gt=0)

    @property
    def sees_each(self) -> tuple[str, ...]:
        return ("model",)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        if task.auxiliary is None:
            raise ConfigError(
                "data.auxiliary: method = fedic needs labelled images at the server (0). Set data.auxiliary=100.",
                code="config.conflict",
                key="data.auxiliary",
                value=0,
            )
        check_averaged_statistics(self.name, config)

    def round(self, server: Server, fleet: Fleet) -> None:
        message = self.message(server)
        got = fleet.ask(
            self.train,
            self.sample(server, fleet),
            message,
            model=each.like(message["model"]).up_to(1e6),  # the limit that a mean has
            loss=mean.like(0.0),
        )
        models = got["model"]
        average = tree.RunningSum()
        for id in sorted(models):
            average.add(models[id], got.weights[id])
        server.step(average.mean())
        assert server.auxiliary is not None, "`prepare` rejects a server without images"
        with server.timings.time("distillation"):
            # the same images serve both terms [1]
            labels_loss, distilled = self.distil(server, server.auxiliary, [models[id] for id in sorted(models)])
        server.log(loss=got["loss"], labels_loss=labels_loss, distillation=distilled)

    def distil(self, server: Server, images: Samples, models: list[tree.Tree]) -> tuple[float, float]:
        """Train the global model on labels and on the ensemble's predictions; return both losses of the last step.

        Args:
            server: The server, whose model is trained.
            images: The server's own images.
            models: Entries of the clients' models.
        """
        student = server.model
        generator = torch.Generator().manual_seed(server.seed("batches"))
        answers = [outputs(with_entries(student, entries), images) for entries in models]
        z = torch.stack([features for features, _ in answers]).mean(0)  # [N, d], equal weights
        logits = torch.stack([of_client for _, of_client in answers])  # [K, N, C] [2]

        tuned = copy.deepcopy(student).train()
        optimiser = Adam(tuned.parameters(), self.distil_lr, 2e-4)
        for rows in self.draws(len(images), generator, server.device):
            batch = images.batch(rows)
            optimiser.step(F.cross_entropy(tuned(batch.x), batch.y))
        own = outputs(tuned, images)[1]  # [N, C]

        ensemble = Ensemble(student.dim, student.classes).to(server.device)
        load_entries(ensemble, server.state.get("ensemble", {}))  # [3]
        optimiser = Adam(ensemble.parameters(), self.distil_lr)
        for rows in self.draws(len(images), generator, server.device):
            optimiser.step(F.cross_entropy(ensemble(z[rows], logits[:, rows], own[rows]), images.y[rows]))
        server.state["ensemble"] = tree.snapshot(ensemble.state_dict())
        with torch.no_grad():
            teacher = ensemble(z, logits, own)  # [N, C]

        hard = soft = torch.zeros(())
        optimiser = Adam(student.train().parameters(), self.distil_lr, 2e-4)
        for rows in self.draws(len(images), generator, server.device):
            batch = images.batch(rows)
            answer = student(batch.x)
            hard = F.cross_entropy(answer, batch.y)
            soft = divergence(answer, teacher=teacher[rows], temperature=self.temperature)  # [4]
            optimiser.step(self.weight * soft + (1 - self.weight) * hard)
        return hard.item(), soft.item()

    def draws(self, n: int, generator: torch.Generator, device: torch.device) -> list[Tensor]:
        """Return the row indices of random batches, one batch per training step.

        A batch contains no row twice.
        """
        size = min(self.distil_batch, n)
        return [torch.randperm(n, generator=generator)[:size].to(device) for _ in range(self.steps)]


class Ensemble(nn.Module):
    """Ensemble of the clients' models, whose logits are weighted by client, calibrated by class and gated.

    The gate mixes them with the logits of the tuned model.
    """

    def __init__(self, dim: int, classes: int):
        super().__init__()
        self.client_scale = nn.Parameter(torch.ones(classes))
        self.client_bias = nn.Parameter(torch.zeros(()))
        self.class_scale = nn.Parameter(torch.ones(classes))
        self.class_bias = nn.Parameter(torch.zeros(classes))
        self.gate_weight = nn.Parameter(torch.zeros(dim))
        self.gate_bias = nn.Parameter(torch.zeros(()))

    def forward(self, z: Tensor, logits: Tensor, own: Tensor) -> Tensor:
        """Return the ensemble's logits [B, C] for a batch [5].

        Args:
            z: Mean features of the clients' models, [B, d].
            logits: Logits of the clients' models, [K, B, C].
            own: Logits of the tuned model, [B, C].
        """
        trust = (logits @ self.client_scale + self.client_bias).sigmoid()  # [K, B]
        weighted = (logits * (trust / trust.sum(0))[..., None]).sum(0)
        calibrated = weighted * self.class_scale + self.class_bias
        gate = (z @ self.gate_weight + self.gate_bias).sigmoid()[:, None]  # [B, 1]
        return gate * calibrated + (1 - gate) * own


@torch.no_grad()
def outputs(model: SplitModel, images: Samples) -> tuple[Tensor, Tensor]:
    """Return the features [N, d] and logits [N, C] of all images, with the model in evaluation mode."""
    model.eval()
    parts = [model.encoder(batch.x) for batch in images.in_order(256)]
    z = torch.cat(parts)
    return z, model.classifier(z)
