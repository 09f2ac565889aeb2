"""What an attacker gets to see of a finished run, and what it would like to know."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from raylt.config import Config, DataConfig
from raylt.core.client import Reply
from raylt.core.experiment import Experiment
from raylt.core.method import Method
from raylt.core.noise import Noise
from raylt.core.reductions import total
from raylt.data.cache import take
from raylt.data.samples import Samples
from raylt.data.sources import open_source
from raylt.data.task import Shard
from raylt.errors import ConfigError
from raylt.methods import METHODS
from raylt.models.split import clipped
from raylt.ops.matching import class_gradients
from raylt.ops.moments import class_means, class_sums, sample_lengths
from raylt.tree import Tree

# the uploads of each method beside a model that is attacked by its update; "features" are what `oracle` alone sends
SENT = {"sfd": ("means", "counts", "synthetic"), "ccvr": ("means", "counts"), "fedncm": ("means", "counts"),
        "fedsm": ("means", "counts"), "noisymeans": ("means", "counts"), "rucr": ("means", "counts"),
        "posthoc": ("counts",), "creff": ("gradients",), "clip2fl": ("gradients",), "mupfl": ("gradients",),
        "flea": ("activations",), "fedyoyo": ("effective",)}
REFERENCE = "features"
LEAVES = {"fedncm": ("n", "z"), "fedsm": ("n", "z"), "noisymeans": ("n", "z", "zz"), "ccvr": ("n", "z", "zz"),
          "sfd": ("n", "z", "zz", "phi")}
# the arrays that each method uploads beside these, by the names that its replies have for them
NOT_ATTACKED = {"ccvr": ("classes.zz",), "noisymeans": ("classes.zz",), "sfd": ("classes.phi", "classes.zz"),
                "fed3r": ("a", "b"), "bpfed": ("scatter",), "scaffold": ("control",), "mupfl": ("map", "start"),
                "rucr": ("classifier",)}
ALWAYS = ("models of rounds of more than one step on one image", "figures such as the loss", "judgements")


# the field without which a method sends nothing of these
ONLY_WITH = {"sfd": "safs", "mupfl": "pkcf"}


def uploads_of(method: Method) -> tuple[str, ...]:
    """The uploads of a method, with its fields, that can be attacked."""
    if method.name == "local":
        return ()
    silent = not getattr(method, ONLY_WITH.get(method.name, ""), True)
    return ("update",) if silent else ("update", *SENT.get(method.name, ()))


def not_attacked(name: str) -> tuple[str, ...]:
    """What a method, by its name, uploads and no attack here is for."""
    return (*(NOT_ATTACKED.get(name, ()) if name in METHODS else ("whatever it uploads beside a model",)), *ALWAYS)


@dataclass(frozen=True)
class Images:
    """Images with what the run's encoder makes of them.

    Attributes:
        x: float32 [n, channels, H, W] in [0, 1].
        y: int64 [n].
        z: features, float32 [n, d].
        client: of each image, int64 [n]; -1 for those of nobody.
    """

    x: Tensor
    y: Tensor
    z: Tensor
    client: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def at(self, rows: Tensor) -> "Images":
        return Images(self.x[rows], self.y[rows], self.z[rows], self.client[rows])


@torch.no_grad()
def look(experiment: Experiment, shard: Shard, client: int) -> Images:
    """The images of a shard under the global model's encoder."""
    samples, config = Samples(shard, experiment.task.facts, experiment.server.device), experiment.config
    encoder = experiment.server.model.encoder.eval()
    z = torch.cat([encoder(batch.x).float() for batch in samples.in_order(config.evaluation.batch)])
    if config.privacy.longest is not None:
        z = clipped(z, config.privacy.longest)
    return Images(samples.x.movedim(3, 1).float() / 255, samples.y, z, torch.full_like(samples.y, client))


def private_images(experiment: Experiment) -> Images:
    """The images of all clients: what an attacker would like to know.

    Raises:
        ConfigError: clients have running statistics of their own, and the server no encoder to see them by.
    """
    if experiment.server.model.stays:
        raise ConfigError("federation.batchnorm = local: clients upload what they make of images with running "
                          "statistics that nobody else has; attack a run with average")
    parts = [look(experiment, shard, k) for k, shard in enumerate(experiment.task.shards) if len(shard)]
    return Images(*(torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y", "z", "client")))


def outside_images(experiment: Experiment, source: str | None, most: int = 5000) -> Images:
    """Images of nobody: the run's test set, or the training images of another source of the same shape.

    Raises:
        ConfigError: they have another shape, or label maps.
    """
    task = experiment.task
    if source is None:
        return look(experiment, task.test, -1)
    data = experiment.config.data
    same = {"size": task.shape[0], "channels": task.shape[2]} if task.shape[2] in (1, 3) else {}
    plain = DataConfig(source=source, root=data.root, fit=data.fit, bad=data.bad)
    other = open_source(plain.model_copy(update=same))
    if other.kind != "classification" or tuple(other.x_train.shape[1:]) != tuple(task.shape):
        raise ConfigError(f"--outside {source}: has images of the shape {list(other.x_train.shape[1:])}, the run's are "
                          f"{list(task.shape)}; take a source of that shape")
    every = len(other.y_train)              # of any order: the first of a folder may be of one class
    rows = np.sort(np.random.default_rng(experiment.config.seed).permutation(every)[:most])
    return look(experiment, Shard(take(other.x_train, rows), take(other.y_train, rows)), -1)


def sends_unit_means(config: Config) -> bool:
    """Whether the class means that clients upload have length 1."""
    return config.method["name"] == "rucr" or (config.method["name"] == "fedsm" and config.method.get("norm") == "l2")


def uploaded_sums(config: Config, images: Images, classes: int) -> Iterator[tuple[int, Tree]]:
    """The sums of features by class that each client uploads, with the noise of `privacy`; of a secure sum the one of
    all together, as that of client -1."""
    clients = images.client.unique().tolist()
    leaves, dim = LEAVES.get(config.method["name"], ("n", "z")), images.z.shape[1]
    lengths = {name: (sample_lengths(config.privacy.clip) | {"phi": 1.0})[name] for name in leaves}
    template = {"n": 1, "z": torch.zeros(dim, dtype=torch.float64)}
    part = total.within(dict.fromkeys(range(classes), template)).bounded(lengths)
    noise = Noise.of({"classes": part}, config)
    for client in [-1] if config.federation.secure else clients:
        own = images if client == -1 else images.at(images.client == client)
        sums = _sums_of_unit_means(own) if sends_unit_means(config) else class_sums(own.z, own.y)
        reply = Reply(1.0, {"classes": {c: {"n": s["n"], "z": s["z"]} for c, s in sums.items()}})
        if noise is not None:
            reply = noise.added(replace(reply), {"classes": part}, 1.0)
        yield client, reply.tree["classes"]


def _sums_of_unit_means(images: Images) -> dict[int, Tree]:
    """Of each class: its count, and the sum over clients of n times its mean at length 1."""
    added: dict[int, Tree] = {}
    for client in images.client.unique().tolist():
        own = images.at(images.client == client)
        for c, sums in class_means(own.z, own.y, unit=True).items():
            before = added.get(c, {"n": 0, "z": 0.0})
            added[c] = {"n": before["n"] + sums["n"], "z": before["z"] + sums["z"].double()}
    return added


def uploaded_gradients(config: Config, images: Images, classifier: nn.Module) -> dict[int, dict[int, Tensor]]:
    """The gradients of the classifier by class [C, d + 1] that each client uploads; of a secure sum those of all
    together, as those of client -1."""
    told = {}
    for client in images.client.unique().tolist():
        own = images.at(images.client == client)
        told[client] = class_gradients(own.z, own.y, classifier)
    if not config.federation.secure:
        return told
    held = sorted({c for gradients in told.values() for c in gradients})
    return {-1: {c: torch.stack([each[c] for each in told.values() if c in each]).sum(0) for c in held}}
