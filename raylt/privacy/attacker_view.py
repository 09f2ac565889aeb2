"""An attacker's view of a finished run: the uploads that it sees, and the private images that it tries to obtain."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from raylt.config import Config, DataConfig
from raylt.core.client import Reply
from raylt.core.experiment import Experiment
from raylt.core.fleet.reductions import total
from raylt.core.method import Method
from raylt.core.protection.sample_dp import Noise
from raylt.core.protection.survivors import fewest_survivors
from raylt.data.images.cache import take
from raylt.data.samples import Samples
from raylt.data.sources.sources import open_source
from raylt.data.task import Shard
from raylt.errors import ConfigError
from raylt.methods import METHODS
from raylt.models.split import clipped
from raylt.ops.matching import class_gradients
from raylt.ops.moments import class_sums, sample_lengths, weighted_class_means
from raylt.tree import Tree

# Uploads of each method besides the model, which is attacked through its update. Only `oracle` sends "features".
SENT = {
    "sfd": ("means", "counts", "synthetic"),
    "ccvr": ("means", "counts"),
    "fedncm": ("means", "counts"),
    "fedsm": ("means", "counts"),
    "noisymeans": ("means", "counts"),
    "rucr": ("means", "counts"),
    "posthoc": ("counts",),
    "la": ("counts",),
    "creff": ("gradients",),
    "clip2fl": ("gradients",),
    "mupfl": ("gradients",),
    "flea": ("activations",),
    "fedyoyo": ("effective",),
}
REFERENCE = "features"
LEAVES = {
    "fedncm": ("n", "z"),
    "fedsm": ("n", "z"),
    "noisymeans": ("n", "z", "zz"),
    "ccvr": ("n", "z", "zz"),
    "sfd": ("n", "z", "zz", "phi"),
}
# Names in replies of other arrays that each method uploads and that no attack covers.
NOT_ATTACKED = {
    "ccvr": ("classes.zz",),
    "noisymeans": ("classes.zz",),
    "sfd": ("classes.phi", "classes.zz"),
    "fed3r": ("a", "b"),
    "bpfed": ("scatter",),
    "scaffold": ("control",),
    "mupfl": ("map", "start"),
    "rucr": ("classifier",),
    "fedproto": ("classes.z",),
    "fednh": ("classes.z",),
}
ALWAYS = ("models of rounds of more than one step on one image", "figures such as the loss", "judgements")
# Field and value with which a method sends these uploads.
ONLY_WITH: dict[str, tuple[str, object]] = {"sfd": ("safs", True), "mupfl": ("pkcf", True), "la": ("prior", "global")}


def uploads_of(method: Method) -> tuple[str, ...]:
    """Return the names of a method's uploads that can be attacked, given the values of its fields."""
    if method.name in ("local", "fedproto"):  # clients upload no model
        return ()
    if method.name in ONLY_WITH:
        field, value = ONLY_WITH[method.name]
        if getattr(method, field) != value:
            return ("update",)
    return ("update", *SENT.get(method.name, ()))


def not_attacked(name: str) -> tuple[str, ...]:
    """Return the names of a method's uploads that no attack of this package covers."""
    own = NOT_ATTACKED.get(name, ()) if name in METHODS else ("any upload besides a model",)
    return (*own, *ALWAYS)


@dataclass(frozen=True)
class Images:
    """Images and their features from the encoder of a run.

    Attributes:
        x: Images, float32 [n, channels, H, W] in [0, 1].
        y: Labels, int64 [n].
        z: Features, float32 [n, d].
        client: Client of each image, int64 [n]; -1 for images that belong to no client.
    """

    x: Tensor
    y: Tensor
    z: Tensor
    client: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def at(self, rows: Tensor) -> "Images":
        """Return the images at the given rows."""
        return Images(self.x[rows], self.y[rows], self.z[rows], self.client[rows])


@torch.no_grad()
def encode_images(experiment: Experiment, shard: Shard, client: int) -> Images:
    """Return the images of a shard and their features from the global model's encoder.

    Args:
        experiment: The attacked run.
        shard: The client's samples.
        client: Id of the client that owns the shard.
    """
    config = experiment.config
    samples = Samples(shard, experiment.task.spec, experiment.server.device)
    encoder = experiment.server.model.encoder.eval()
    z = torch.cat([encoder(batch.x).float() for batch in samples.in_order(config.evaluation.batch)])
    if config.privacy.longest is not None:
        z = clipped(z, config.privacy.longest)
    return Images(samples.x.movedim(3, 1).float() / 255, samples.y, z, torch.full_like(samples.y, client))


def private_images(experiment: Experiment) -> Images:
    """Return the images of all clients that trained, which an attacker tries to reconstruct.

    Raises:
        ConfigError: Clients have running statistics of their own, so the server does not have their encoders; or they
            trained on features of a frozen encoder, so the task has no images.
    """
    if experiment.server.model.local_buffers:
        raise ConfigError(
            "federation.batchnorm: uploads depend on running statistics that only the clients have (local). Use a run "
            "with average.",
            code="privacy.nothing-to-attack",
            key="federation.batchnorm",
            value="local",
        )
    if len(experiment.task.test.x.shape) != 4:
        trainable = experiment.config.trainable
        raise ConfigError(
            f"trainable: clients trained on features of a frozen encoder, but attacks need images ({trainable}). Use "
            "a run with all.",
            code="privacy.nothing-to-attack",
            key="trainable",
            value=trainable,
        )
    task = experiment.task
    trained = [k for k, shard in enumerate(task.shards) if len(shard) and k not in task.new_clients]
    parts = [encode_images(experiment, task.shards[k], k) for k in trained]
    return Images(*(torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y", "z", "client")))


def outside_images(experiment: Experiment, source: str | None, most: int = 5000) -> Images:
    """Return images that belong to no client: the run's test set, or training images of another source.

    Args:
        experiment: The finished run.
        source: Name of the other source; None for the test set.
        most: Maximum number of images of another source.

    Raises:
        ConfigError: The images of the source have another shape, or label maps.
    """
    task = experiment.task
    if source is None:
        return encode_images(experiment, task.test, -1)
    data = experiment.config.data
    same = {"size": task.shape[0], "channels": task.shape[2]} if task.shape[2] in (1, 3) else {}
    plain = DataConfig(source=source, root=data.root, fit=data.fit, bad=data.bad, depth=data.depth)
    try:
        other = open_source(plain.model_copy(update=same))
    except ConfigError as error:
        raise ConfigError(
            str(error).replace("data.source:", "--outside:", 1), code=error.code, **error.details | {"key": "--outside"}
        ) from None
    if other.kind != "classification" or tuple(other.x_train.shape[1:]) != tuple(task.shape):
        raise ConfigError(
            f"--outside: the images of {source} have another shape than the run's ({list(other.x_train.shape[1:])}, "
            f"{list(task.shape)}). Give a source with images of the run's shape.",
            code="data.wrong-shape",
            key="--outside",
            value=source,
        )
    count = len(other.y_train)
    # draw at random, because the first images of a folder may all be of one class
    rows = np.sort(np.random.default_rng(experiment.config.seed).permutation(count)[:most])
    return encode_images(experiment, Shard(take(other.x_train, rows), take(other.y_train, rows)), -1)


def sends_unit_means(config: Config) -> bool:
    """Return whether clients upload class means that are scaled to length 1."""
    return config.method["name"] == "rucr" or (config.method["name"] == "fedsm" and config.method.get("norm") == "l2")


def uploaded_sums(config: Config, images: Images, classes: int) -> Iterator[tuple[int, Tree]]:
    """Yield the class sums of features that each client uploads, with the configured privacy noise.

    A secure sum over all clients counts as the upload of client -1. It has the noise of each client's share, which is
    more than the full noise because no client was lost.

    Args:
        config: Configuration of the attacked run.
        images: The images of all clients that trained.
        classes: Number of classes.

    Yields:
        The client's id and its sums by class.
    """
    clients = images.client.unique().tolist()
    leaves = LEAVES.get(config.method["name"], ("n", "z"))
    all_lengths = sample_lengths(config.privacy.clip) | {"phi": 1.0}
    lengths = {name: all_lengths[name] for name in leaves}
    template = {"n": 1, "z": torch.zeros(images.z.shape[1], dtype=torch.float64)}
    part = total.within(dict.fromkeys(range(classes), template)).bounded(lengths)
    noise = Noise.of({"classes": part}, config)
    variance = len(clients) / fewest_survivors(len(clients)) if config.federation.secure else 1.0
    for client in [-1] if config.federation.secure else clients:
        own = images if client == -1 else images.at(images.client == client)
        sums = _sums_of_unit_means(own) if sends_unit_means(config) else class_sums(own.z, own.y)
        reply = Reply(1.0, {"classes": {c: {"n": s["n"], "z": s["z"]} for c, s in sums.items()}})
        if noise is not None:
            reply = noise.add_to(reply, {"classes": part}, variance)
        yield client, reply.tree["classes"]


def _sums_of_unit_means(images: Images) -> dict[int, Tree]:
    """Return, for each class, the total count and the sum over clients of the count times the unit-length mean."""
    totals: dict[int, Tree] = {}
    for client in images.client.unique().tolist():
        own = images.at(images.client == client)
        for c, sums in weighted_class_means(own.z, own.y, unit=True).items():
            before = totals.get(c, {"n": 0, "z": 0.0})
            totals[c] = {"n": before["n"] + sums["n"], "z": before["z"] + sums["z"].double()}
    return totals


def uploaded_gradients(config: Config, images: Images, classifier: nn.Module) -> dict[int, dict[int, Tensor]]:
    """Return the classifier gradients that each client uploads, one matrix [C, d + 1] per class.

    A secure sum over all clients counts as the upload of client -1.

    Args:
        config: Configuration of the attacked run.
        images: The images of all clients.
        classifier: The global classifier, with a bias.

    Returns:
        The gradients by client and class.
    """
    uploads = {}
    for client in images.client.unique().tolist():
        own = images.at(images.client == client)
        uploads[client] = class_gradients(own.z, own.y, classifier)
    if not config.federation.secure:
        return uploads
    classes = sorted({c for gradients in uploads.values() for c in gradients})
    by_class = {c: [gradients[c] for gradients in uploads.values() if c in gradients] for c in classes}
    return {-1: {c: torch.stack(gradients).sum(0) for c, gradients in by_class.items()}}
