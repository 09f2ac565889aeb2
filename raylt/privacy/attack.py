"""Attacks on a finished run, which reconstruct private images from uploads and measure their similarity."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.core.experiment import Experiment
from raylt.errors import ConfigError, did_you_mean
from raylt.methods.fedyoyo import effective_samples
from raylt.methods.flea import FLea
from raylt.models.layers import halves
from raylt.models.split import linear, trained_names
from raylt.privacy.attacker_view import (
    REFERENCE,
    Images,
    outside_images,
    private_images,
    sends_unit_means,
    uploaded_gradients,
    uploaded_sums,
    uploads_of,
)
from raylt.privacy.feature_inversion import Inverter, mean_features, shuffled
from raylt.privacy.gradient_inversion import gradient_of, invert_gradient
from raylt.privacy.reconstruction import AttackFinding, Nearness, check_measures, nearness
from raylt.runs.run import Run
from raylt.seeds import seed_for
from raylt.tree import Tree

MAX_RECONSTRUCTIONS = 200
MAX_UPDATES = 4  # A reconstruction from an update takes seconds.
PICTURE_COLUMNS = 12


def attack(run: Run, upload: str | None = None, outside: str | None = None, epochs: int = 60) -> list[AttackFinding]:
    """Attack the uploads of a finished run with what the server knows: the model, and images that no client has.

    Args:
        run: The run.
        upload: One of `uploads_of` the method, or "features", the reference; by default all of them.
        outside: Source of the images on which decoders are trained; by default the test set. It has the distribution
            of the clients' images, so it is the best case for an attacker.
        epochs: Number of epochs of the decoders' training.

    Raises:
        ConfigError: The upload is unknown, torchmetrics is not installed, or the outside images have another shape.
    """
    check_measures()
    uploads = (REFERENCE, *uploads_of(run.method))
    if upload is not None and upload not in uploads:
        raise ConfigError(
            f"--upload: {run.method.name} has no upload of this name that can be attacked ({upload}). "
            f"{did_you_mean(upload, uploads)}Give one of: {', '.join(uploads)}.",
            code="config.unknown-name",
            key="--upload",
            value=upload,
            choices=uploads,
        )
    experiment = run.finished().experiment(clients=False)
    if experiment.task.kind != "classification":
        raise ConfigError(
            f"{run.folder}: attacks apply to classification, but the run's labels are maps ({experiment.task.name}). "
            "Give another run.",
            code="run.wrong-kind",
            path=str(run.folder),
            task=experiment.task.kind,
        )
    attacker = _Attacker(experiment, outside, epochs)
    findings: list[AttackFinding] = []
    for name in uploads:
        if upload in (None, name):
            findings += getattr(attacker, name)()
    return findings


class _Attacker:
    """Attacks on one finished run, with one method for each kind of upload."""

    def __init__(self, experiment: Experiment, outside: str | None, epochs: int):
        self.experiment = experiment
        self.config = experiment.config
        self.private = private_images(experiment)
        self.outside = outside_images(experiment, outside)
        self.unseen = None if outside is None else outside_images(experiment, None)  # not used to train decoders
        self._epochs = epochs
        self._decoders: dict[tuple[str, bool], Inverter] = {}
        x, y = self.outside.x, self.outside.y
        whole = x.mean(0)
        shown = y.unique().tolist() if outside is None else []  # another source has other classes
        self.averages = torch.stack(
            [x[y == c].mean(0) if c in shown else whole for c in range(experiment.task.classes)]
        )

    def features(self) -> list[AttackFinding]:
        """Reconstruct images from features of single images, which methods that share features upload."""
        return [self._inverted(REFERENCE, "features of single images, by a decoder", self.private.z, self.private)]

    def means(self) -> list[AttackFinding]:
        """Reconstruct images from class means of features; compare them with the nearest image of the class."""
        rows: list[Tensor] = []
        means: list[Tensor] = []
        of_one_image: list[bool] = []
        private = self.private.z
        outside = None
        if sends_unit_means(self.config):  # decoders for unit means are trained on unit features
            private = F.normalize(self.private.z, dim=1)
            outside = F.normalize(self.outside.z, dim=1)
        for client, sums in uploaded_sums(self.config, self.private, self.experiment.task.classes):
            for c, sums_of_class in sums.items():
                images = self._rows_of(client, c)
                if sums_of_class["n"] < 0.5 or not len(images):
                    continue
                mean = (sums_of_class["z"] / sums_of_class["n"]).float()
                rows.append(images[(private[images] - mean).norm(dim=1).argmin()])
                means.append(mean)
                of_one_image.append(len(images) == 1)
        kinds = {
            "means of several images, against the one nearest to each": [not one for one in of_one_image],
            "means of a single image": of_one_image,
        }
        findings = []
        for what, chosen in kinds.items():
            if any(chosen):
                z = torch.stack(means)[torch.tensor(chosen)]
                true = self.private.at(torch.stack(rows)[torch.tensor(chosen)])
                findings.append(self._inverted("means", f"{what}, by a decoder", z, true, outside))
        return findings

    def activations(self) -> list[AttackFinding]:
        """Reconstruct images from FLea's uploads, which are activations of single images after a layer."""
        method = self.experiment.method
        assert isinstance(method, FLea)
        lower = halves(self.experiment.server.model.eval(), method.layer)[0]
        true = self.private.at(self._some(len(self.private)))
        what = f"activations behind {method.layer}, of single images, by a decoder"
        outside = self._activations_of(lower, self.outside.x)
        return [self._inverted("activations", what, self._activations_of(lower, true.x), true, outside)]

    @torch.no_grad()
    def _activations_of(self, lower: nn.Module, x: Tensor) -> Tensor:
        """Return the output of the lower part of the encoder for images in [0, 1], flattened to [n, ...]."""
        mean, std = self._normalisation(x.device)
        return torch.cat([lower((part - mean) / std).flatten(1) for part in x.split(self.config.evaluation.batch)])

    def gradients(self) -> list[AttackFinding]:
        """Reconstruct images from class gradients of the classifier, which reveal each class's mean feature."""
        entries = self.experiment.server.model.classifier.state_dict()
        classifier = linear(entries["weight"], entries.get("bias"))
        if entries.get("bias") is None:
            raise ConfigError(
                "--upload: mean features follow from the gradient of the classifier's bias, but this classifier has no "
                "bias (gradients). Give another upload.",
                code="privacy.nothing-to-attack",
                key="--upload",
                value="gradients",
            )
        rows: list[Tensor] = []
        means: list[Tensor] = []
        for client, gradients in uploaded_gradients(self.config, self.private, classifier).items():
            for c, gradient in gradients.items():
                images = self._rows_of(client, c)
                mean = mean_features(gradient)
                means.append(mean)
                rows.append(images[(self.private.z[images] - mean).norm(dim=1).argmin()])
        what = "class gradients, read for their mean feature, by a decoder"
        return [self._inverted("gradients", what, torch.stack(means), self.private.at(torch.stack(rows)))]

    def synthetic(self) -> list[AttackFinding]:
        """Reconstruct images from SFD's synthetic features; compare them with the nearest private image of the class.

        A synthetic feature belongs to no single image. Features of images that were not used for training are evaluated
        in the same way, as the baseline by chance.
        """
        bank = self.experiment.server.state.get("synthetic")
        if bank is None:
            return []
        chosen = self._some(len(bank["y"]))
        device = self.private.z.device
        z = bank["z"].float()[chosen].to(device)
        y = bank["y"][chosen].to(device)
        findings = [self._against_nearest("synthetic features", z, y)]
        if self.unseen is not None:
            unseen = self.unseen.at(self._some(len(self.unseen)))
            findings.append(self._against_nearest("for comparison: features of test images", unseen.z, unseen.y))
        return findings

    def _against_nearest(self, what: str, z: Tensor, y: Tensor) -> AttackFinding:
        """Reconstruct images from given features; compare them with the nearest private images of the same classes."""
        distances = torch.cdist(z, self.private.z).masked_fill(y[:, None] != self.private.y[None], torch.inf)
        what = f"{what}, against the nearest image of their class, by a decoder"
        return self._inverted("synthetic", what, z, self.private.at(distances.argmin(1)))

    def update(self) -> list[AttackFinding]:
        """Reconstruct an image from the update of one training step on this image (the standard attack).

        An update after a round of several epochs over many images is much harder to attack.
        """
        model = self.experiment.server.model.eval()
        chosen = self.private.at(self._some(len(self.private))[:MAX_UPDATES])
        learned = self.experiment.method.shared(model).keys() & trained_names(model)
        if self.config.federation.secure or not any(name.startswith("classifier.") for name in learned):
            return []  # the server sees no single update, or no gradient of the classifier
        mean, std = self._normalisation(chosen.x.device)
        gradients = [
            gradient_of(model, (x[None] - mean) / std, y[None]) for x, y in zip(chosen.x, chosen.y, strict=True)
        ]

        def reconstruct(uploads: list[list[Tensor]]) -> Tensor:
            shape = self.experiment.task.spec.shape
            return torch.cat(
                [invert_gradient(model, upload, shape, mean.flatten(), std.flatten()) for upload in uploads]
            )

        made = reconstruct(gradients)
        control = reconstruct([*gradients[1:], gradients[0]])
        return [self._finding("update", "one step on one image, by its gradient's direction", made, chosen, control)]

    def counts(self) -> list[AttackFinding]:
        """Guess from uploaded class counts which clients have a rare class (one of the rarest third)."""
        return self._holders("counts", dict(uploaded_sums(self.config, self.private, self.experiment.task.classes)))

    def effective(self) -> list[AttackFinding]:
        """Guess from FedYoYo's effective sample numbers which clients have a rare class, with one batch per client."""
        classes = self.experiment.task.classes
        uploads: dict[int, Tree] = {}
        for client in self.private.client.unique().tolist():
            own = self.private.at(self.private.client == client)
            one_hot = F.one_hot(own.y, classes).float()
            means = one_hot.T @ own.z / one_hot.sum(0).clamp(min=1)[:, None]
            effective = effective_samples(own.z - means[own.y], own.y, classes).tolist()
            uploads[client] = {c: {"n": n} for c, n in enumerate(effective)}
        if self.config.federation.secure:
            uploads = {-1: {c: {"n": sum(upload[c]["n"] for upload in uploads.values())} for c in range(classes)}}
        return self._holders("effective", uploads)

    def _holders(self, upload: str, uploads: Mapping[int, Tree]) -> list[AttackFinding]:
        """Guess from uploaded numbers of samples, `n`, which clients have a rare class.

        A secure sum counts as the upload of client -1.
        """
        task = self.experiment.task
        rare = np.argsort(task.counts, kind="stable")[: max(1, task.classes // 3)].tolist()
        clients = self.private.client.unique().tolist()
        truth: list[bool] = []
        guesses: list[bool] = []
        for client in clients:
            numbers = uploads.get(client, uploads.get(-1, {}))
            share = 1 if client in uploads else len(clients)  # a sum is divided equally among the clients
            for c in rare:
                truth.append(bool(task.client_counts[client, c]))
                guesses.append(numbers.get(c, {"n": 0})["n"] / share >= 0.5)
        right = []
        for answer in (True, False):
            if answer in truth:
                right.append(
                    np.mean([guess == answer for guess, true in zip(guesses, truth, strict=True) if true == answer])
                )
        what = f"whether a client holds a class of the rarest {len(rare)}, guessed from its {upload}"
        return [AttackFinding(upload, what, len(truth), guessed=float(np.mean(right)))]

    def _inverted(
        self, upload: str, what: str, z: Tensor, true: Images, outside: Tensor | None = None
    ) -> AttackFinding:
        """Reconstruct images from features by decoders trained on outside images; return the finding.

        Args:
            upload: Kind of the upload.
            what: Description of the attack.
            z: Uploaded features, [n, d].
            true: The private images to compare with.
            outside: Uploads of the outside images, if they are not features.
        """
        chosen = self._some(len(z))
        z = z[chosen]
        true = true.at(chosen)
        name, learnt = (REFERENCE, self.outside.z) if outside is None else (upload, outside)
        made = self._decoder(name, learnt, paired=True)(z)
        control = self._decoder(name, learnt, paired=False)(z)
        return self._finding(upload, what, made, true, control)

    def _finding(self, upload: str, what: str, made: Tensor, true: Images, control: Tensor) -> AttackFinding:
        nearest = self.private.x[torch.cdist(made.flatten(1), self.private.x.flatten(1)).argmin(1)]
        return AttackFinding(
            upload,
            what,
            len(made),
            reached=self._nearness(made, true),
            control=self._nearness(control, true),
            average=self._nearness(self.averages[true.y], true),
            shown=torch.stack([images[:PICTURE_COLUMNS].cpu() for images in (true.x, made, nearest)]),
        )

    def _nearness(self, images: Tensor, true: Images) -> Nearness:
        return nearness(images, true.x, self.private.x, true.y, self.private.y)

    def _decoder(self, name: str, z: Tensor, paired: bool) -> Inverter:
        """Return the decoder trained for an upload.

        If not `paired`, return a control: a decoder trained on features paired with wrong images.
        """
        if (name, paired) not in self._decoders:
            seed = seed_for(self.config.seed, "attack")
            x = self.outside.x if paired else shuffled(self.outside.x, seed)
            self._decoders[name, paired] = Inverter(z, x, self._epochs, seed)
        return self._decoders[name, paired]

    def _rows_of(self, client: int, c: int) -> Tensor:
        """Return the rows of a client's private images of class c. Client -1 stands for all clients."""
        owned = (self.private.client == client) | (client == -1)
        return torch.nonzero(owned & (self.private.y == c)).flatten()

    def _normalisation(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the mean and standard deviation of the channels, each [channels, 1, 1]."""
        facts = self.experiment.task.spec
        mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (facts.mean, facts.std))
        return mean, std

    def _some(self, count: int) -> Tensor:
        """Return at most `MAX_RECONSTRUCTIONS` random indices below `count`, the same for every call on a run."""
        generator = torch.Generator().manual_seed(seed_for(self.config.seed, "attacked"))
        return torch.randperm(count, generator=generator)[:MAX_RECONSTRUCTIONS]
