"""The workload that every system of the speed table runs: the same images, clients, network and settings.

A folder holds `scale.json` (a `Scale`), `data.npz` (`x_train` uint8 [N, H, W, channels], `y_train`, `id_train`: whose
each image is) and `initial.pt` (the weights that all start from). Needs numpy and torch alone: each system has an
environment of its own.
"""

# pyright: reportPrivateImportUsage=false

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Scale:
    """One size of the comparison: numbers of clients, images and rounds, and the network.

    In each of `rounds` rounds, `per_round` of `clients` train a local epoch over their `samples` images by plain SGD.
    """

    name: str
    model: str
    clients: int
    per_round: int
    samples: int
    batch: int
    rounds: int
    lr: float
    side: int
    channels: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


class Work:
    """The content of a workload folder, loaded into memory."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.scale = Scale(**json.loads((self.folder / "scale.json").read_text()))
        with np.load(self.folder / "data.npz") as data:
            self.x, self.y = torch.from_numpy(data["x_train"]), torch.from_numpy(data["y_train"])
            owner = data["id_train"]
        order = np.argsort(owner, kind="stable")
        self.clients = np.split(order, np.cumsum(np.bincount(owner))[:-1])  # of each, the rows of its images
        self.mean = torch.tensor(self.scale.mean).view(-1, 1, 1)
        self.std = torch.tensor(self.scale.std).view(-1, 1, 1)

    def model(self) -> nn.Module:
        """Return the network with the common initial weights, in the memory layout that is fastest on a CPU."""
        net = {"resnet8": resnet8, "cnn": cnn}[self.scale.model](self.scale.channels)
        net.load_state_dict(torch.load(self.folder / "initial.pt"))
        return net.to(memory_format=torch.channels_last)

    def images(self, rows: Tensor | np.ndarray) -> tuple[Tensor, Tensor]:
        """Return normalised images, float32 [B, channels, H, W], and labels, int64 [B]."""
        rows = torch.as_tensor(rows)
        return ((self.x[rows].permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std), self.y[rows]

    def batches(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a client's images once in batches, in a random order."""
        rows = torch.as_tensor(self.clients[client])
        for part in rows[torch.randperm(len(rows))].split(self.scale.batch):
            yield self.images(part)

    def train(self, net: nn.Module, client: int) -> None:
        """Train a client for one local epoch, for systems that leave this to their users.

        An SGD of a line instead of torch.optim's, whose import takes seconds.
        """
        net.train()
        params: list[Tensor] = list(net.parameters())
        for x, y in self.batches(client):
            grads = torch.autograd.grad(F.cross_entropy(net(x), y), params)
            with torch.no_grad():
                torch._foreach_add_(params, grads, alpha=-self.scale.lr)

    def finish(self, system: str, state: dict[str, Tensor]) -> None:
        """Save the global model for `benchmarks/speed.py`, which evaluates what was learned."""
        torch.save(
            {name: value.detach().cpu().contiguous() for name, value in state.items()}, self.folder / f"{system}.pt"
        )


def mark(number: int) -> None:
    """Report the end of a round, when the mean of its models is formed."""
    print(f"ROUND {number}", flush=True)


class Block(nn.Module):
    """Residual block of two 3x3 convolutions and a shortcut."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = (
            nn.Identity()
            if before == width and stride == 1
            else nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu_(self.bn1(self.conv1(x)))
        return F.relu_(self.bn2(self.conv2(h)) + self.shortcut(x))


class Network(nn.Module):
    """Network that computes `classifier(encoder(x))`, with the same entry names as in raylt."""

    def __init__(self, encoder: "OrderedDict[str, nn.Module]", dim: int):
        super().__init__()
        self.encoder, self.classifier = nn.Sequential(encoder), nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder(x))


def resnet8(channels: int) -> Network:
    """Build CReFF's ResNet-8 of width 64, with 1.2 million parameters."""
    return Network(
        OrderedDict(
            stem=nn.Sequential(
                nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
            ),
            stage1=nn.Sequential(Block(64, 64, 1)),
            stage2=nn.Sequential(Block(64, 128, 2)),
            stage3=nn.Sequential(Block(128, 256, 2)),
            pool=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        ),
        256,
    )


def cnn(channels: int) -> Network:
    """Build two 5x5 convolutions and a linear layer for 28x28 images, with 62 thousand parameters."""
    return Network(
        OrderedDict(
            stage1=nn.Sequential(nn.Conv2d(channels, 32, 5), nn.ReLU(inplace=True)),
            stage2=nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(inplace=True)),
            pool=nn.Sequential(nn.MaxPool2d(2), nn.Flatten()),
        ),
        1024,
    )
