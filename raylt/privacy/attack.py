"""`attack`: what somebody who sees an upload of a finished run can make of it, in figures and a picture."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.core.experiment import Experiment
from raylt.errors import ConfigError
from raylt.methods.fedyoyo import effective_samples
from raylt.methods.flea import FLea, halves
from raylt.models.split import linear
from raylt.privacy.decoder import Inverter, mean_features, shuffled
from raylt.privacy.finding import Finding
from raylt.privacy.gradients import gradient_of, invert_gradient
from raylt.privacy.measures import Nearness, check_measures, nearness
from raylt.privacy.seen import (
    REFERENCE,
    Images,
    outside_images,
    private_images,
    sends_unit_means,
    uploaded_gradients,
    uploaded_sums,
    uploads_of,
)
from raylt.runs.run import Run
from raylt.seeds import seed_for
from raylt.tree import Tree

MOST = 200              # reconstructions that are measured; of updates, which take seconds each, FEW
FEW = 4


def attack(run: Run, upload: str | None = None, outside: str | None = None, epochs: int = 60) -> list[Finding]:
    """Attacks the uploads of a finished run with what the server knows: the model, and images of nobody in it.

    Args:
        upload: one of `uploads_of` its method, or "features", the reference; None for all of them.
        outside: source of the images that decoders are trained on; by default the test set, which is drawn as the
            clients' images are, the most that an attacker can hope for.
        epochs: of the decoders.

    Raises:
        ConfigError: no such upload, torchmetrics is missing, or the outside images have another shape.
    """
    check_measures()
    known = (REFERENCE, *uploads_of(run.method))
    if upload is not None and upload not in known:
        raise ConfigError(f"--upload {upload}: {run.method.name} uploads nothing of this name that can be attacked; "
                          f"there are: {', '.join(known)}")
    experiment = run.finished().experiment()
    if experiment.task.kind != "classification":
        raise ConfigError(f"{run.folder}: attacks are for classification, the run's labels are maps")
    attacker = _Attacker(experiment, outside, epochs)
    return [finding for name in known if upload in (None, name) for finding in getattr(attacker, name)()]


class _Attacker:
    """One function for each upload."""

    def __init__(self, experiment: Experiment, outside: str | None, epochs: int):
        self.experiment, self.config = experiment, experiment.config
        self.private, self.outside = private_images(experiment), outside_images(experiment, outside)
        self._epochs, self._pair = epochs, dict[tuple[str, bool], Inverter]()
        self.unseen = None if outside is None else outside_images(experiment, None)     # decoders saw none of these
        x, y = self.outside.x, self.outside.y
        whole, shown = x.mean(0), y.unique().tolist() if outside is None else []    # others' labels are other classes
        self.averages = torch.stack([x[y == c].mean(0) if c in shown else whole
                                     for c in range(experiment.task.classes)])

    def features(self) -> list[Finding]:
        """Of single images, as methods that share features send them (of those here `oracle`)."""
        return [self._inverted(REFERENCE, "features of single images, by a decoder", self.private.z, self.private)]

    def means(self) -> list[Finding]:
        rows, z, alone, unit = [], [], [], sends_unit_means(self.config)
        mine, outside = self.private.z, None
        if unit:            # decoders for these learn from features at that length, too
            mine, outside = F.normalize(mine, dim=1), F.normalize(self.outside.z, dim=1)
        for client, sums in uploaded_sums(self.config, self.private, self.experiment.task.classes):
            for c, of_class in sums.items():
                theirs = (self.private.client == client) | (client == -1)
                held = torch.nonzero(theirs & (self.private.y == c)).flatten()
                if of_class["n"] < 0.5 or not len(held):
                    continue
                mean = (of_class["z"] / of_class["n"]).float()
                rows.append(held[(mine[held] - mean).norm(dim=1).argmin()])
                z.append(mean)
                alone.append(len(held) == 1)
        kinds = {"means of several images, against the one nearest to each": [not one for one in alone],
                 "means of a single image": alone}
        return [self._inverted("means", f"{what}, by a decoder", torch.stack(z)[torch.tensor(kind)],
                               self.private.at(torch.stack(rows)[torch.tensor(kind)]), outside)
                for what, kind in kinds.items() if any(kind)]

    def activations(self) -> list[Finding]:
        """FLea's: what stands behind a layer, of single images."""
        model, method = self.experiment.server.model.eval(), self.experiment.method
        assert isinstance(method, FLea)
        lower, true = halves(model, method.layer)[0], self.private.at(self._some(len(self.private)))
        outside = self._behind(lower, self.outside.x)
        return [self._inverted("activations", f"activations behind {method.layer}, of single images, by a decoder",
                               self._behind(lower, true.x), true, outside)]

    @torch.no_grad()
    def _behind(self, lower: nn.Module, x: Tensor) -> Tensor:
        """What a part of the encoder makes of images in [0, 1], [n, ...] flattened."""
        facts = self.experiment.task.facts
        mean, std = (torch.tensor(values, device=x.device)[:, None, None] for values in (facts.mean, facts.std))
        return torch.cat([lower((part - mean) / std).flatten(1) for part in x.split(self.config.evaluation.batch)])

    def gradients(self) -> list[Finding]:
        """Of classes, under the global classifier: the feature mean stands in the row of the class."""
        entries = self.experiment.server.model.classifier.state_dict()
        classifier = linear(entries["weight"], entries.get("bias"))
        if entries.get("bias") is None:
            raise ConfigError("--upload gradients: the run's classifier has no bias, by which means are read off")
        rows, z = [], []
        for client, gradients in uploaded_gradients(self.config, self.private, classifier).items():
            for c, gradient in gradients.items():
                theirs = (self.private.client == client) | (client == -1)
                own = torch.nonzero(theirs & (self.private.y == c)).flatten()
                z.append(mean_features(gradient))
                rows.append(own[(self.private.z[own] - z[-1]).norm(dim=1).argmin()])
        return [self._inverted("gradients", "class gradients, read for their mean feature, by a decoder",
                               torch.stack(z), self.private.at(torch.stack(rows)))]

    def synthetic(self) -> list[Finding]:
        """SFD's features, of which no single image is the truth: the nearest of the class stands for it. What features
        of images that took no part in training come to in the same way tells nearness from chance."""
        bank = self.experiment.server.state.get("synthetic")
        if bank is None:
            return []
        places = self._some(len(bank["y"]))
        device = self.private.z.device
        made = [self._beside("synthetic features", bank["z"].float()[places].to(device),
                             bank["y"][places].to(device))]
        if self.unseen is not None:
            others = self.unseen.at(self._some(len(self.unseen)))
            made.append(self._beside("for comparison: features of test images", others.z, others.y))
        return made

    def _beside(self, what: str, z: Tensor, y: Tensor) -> Finding:
        """Of features that are of no private image, held against the nearest of their class."""
        distances = torch.cdist(z, self.private.z).masked_fill(y[:, None] != self.private.y[None], torch.inf)
        return self._inverted("synthetic", f"{what}, against the nearest image of their class, by a decoder", z,
                              self.private.at(distances.argmin(1)))

    def update(self) -> list[Finding]:
        """Of one step on one image, the classic reference: far from a round of several epochs over many."""
        model, chosen = self.experiment.server.model.eval(), self.private.at(self._some(len(self.private))[:FEW])
        sent = self.experiment.method.shared(model)
        if self.config.federation.secure or not any(name.startswith("classifier.") for name in sent):
            return []                           # nobody sees one, or none that the label could be read off
        facts = self.experiment.task.facts
        mean, std = (torch.tensor(values, device=chosen.x.device) for values in (facts.mean, facts.std))
        gradients = [gradient_of(model, (x[None] - mean[:, None, None]) / std[:, None, None], y[None])
                     for x, y in zip(chosen.x, chosen.y, strict=True)]

        def inverted(sent: list[list[Tensor]]) -> Tensor:
            return torch.cat([invert_gradient(model, gradient, facts.shape, mean, std) for gradient in sent])

        made = inverted(gradients)
        return [self._finding("update", "one step on one image, by its gradient's direction", made, chosen,
                              inverted([*gradients[1:], gradients[0]]))]

    def counts(self) -> list[Finding]:
        """Whether a client holds a class of the smallest third, guessed from what it says that it holds."""
        return self._holders("counts", dict(uploaded_sums(self.config, self.private, self.experiment.task.classes)))

    def effective(self) -> list[Finding]:
        """The same from FedYoYo's effective samples of each class, all of a client's in one batch."""
        seen, c, clients = {}, self.experiment.task.classes, self.private.client
        for client in clients.unique().tolist():
            own = self.private.at(clients == client)
            held = F.one_hot(own.y, c).float()
            means = held.T @ own.z / held.sum(0).clamp(min=1)[:, None]
            told = effective_samples(own.z - means[own.y], own.y, c).tolist()
            seen[client] = {k: {"n": n} for k, n in enumerate(told)}
        if self.config.federation.secure:
            seen = {-1: {k: {"n": sum(told[k]["n"] for told in seen.values())} for k in range(c)}}
        return self._holders("effective", seen)

    def _holders(self, upload: str, seen: Mapping[int, Tree]) -> list[Finding]:
        """Guesses from the numbers `n` of each class, by client; of a sum as those of client -1."""
        task = self.experiment.task
        rare = np.argsort(task.counts, kind="stable")[:max(1, task.classes // 3)].tolist()
        truth, guesses = [], []
        for client in self.private.client.unique().tolist():
            told = seen.get(client, seen.get(-1, {}))
            share = 1 if client in seen else len(self.private.client.unique())      # of a sum, each an equal part
            for c in rare:
                truth.append(bool(task.client_counts[client, c]))
                guesses.append(told.get(c, {"n": 0})["n"] / share >= 0.5)
        right = [np.mean([guess == kind for guess, true in zip(guesses, truth, strict=True) if true == kind])
                 for kind in (True, False) if kind in truth]
        return [Finding(upload, f"whether a client holds a class of the rarest {len(rare)}, guessed from its {upload}",
                        len(truth), guessed=float(np.mean(right)))]

    def _inverted(self, upload: str, what: str, z: Tensor, true: Images, outside: Tensor | None = None) -> Finding:
        """By decoders that learnt from features of outside images, or from what else is uploaded of these."""
        chosen = self._some(len(z))
        z, true = z[chosen], true.at(chosen)
        of, learnt = (REFERENCE, self.outside.z) if outside is None else (upload, outside)
        made, control = (self._decoder(of, learnt, honest)(z) for honest in (True, False))
        return self._finding(upload, what, made, true, control)

    def _finding(self, upload: str, what: str, made: Tensor, true: Images, control: Tensor) -> Finding:
        measure: Callable[[Tensor], Nearness] = lambda images: nearness(  # noqa: E731 - of the same truth, three times
            images, true.x, self.private.x, true.y, self.private.y)
        columns = min(12, len(made))
        nearest = self.private.x[torch.cdist(made.flatten(1), self.private.x.flatten(1)).argmin(1)]
        shown = torch.stack([part[:columns].cpu() for part in (true.x, made, nearest)])
        return Finding(upload, what, len(made), measure(made), measure(control), measure(self.averages[true.y]),
                       shown=shown)

    def _decoder(self, of: str, z: Tensor, honest: bool) -> Inverter:
        if (of, honest) not in self._pair:
            seed = seed_for(self.config.seed, "attack")
            x = self.outside.x if honest else shuffled(self.outside.x, seed)
            self._pair[of, honest] = Inverter(z, x, self._epochs, seed)
        return self._pair[of, honest]

    def _some(self, count: int) -> Tensor:
        """At most `MOST` places, the same for the same run."""
        generator = torch.Generator().manual_seed(seed_for(self.config.seed, "attacked"))
        return torch.randperm(count, generator=generator)[:MOST]
