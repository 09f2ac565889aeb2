"""Fits a small image tower to given text embeddings, and writes the features that method.teacher=npz:FILE reads.

    python benchmarks/standin.py IMAGES.npz TEXT.npy TARGET.npz TARGET_TEXT.npy OUT.npz [--epochs 30]

For measuring FedSM where no pretrained image tower can be had. The text tower is locked: row c of TEXT is the embedding
of class c of IMAGES, and the image tower learns to bring an image's feature near its class's (cross-entropy over scaled
cosines). What comes of it is a stand-in and is called so wherever it is used: it is not CLIP, wherever the texts come
from.

IMAGES and TARGET are npz files as data.source=npz:PATH takes them. TARGET's training images are encoded for OUT; its
test set serves to report the zero-shot accuracy, its training images and labels are not learnt from. Images are halved
until they have TARGET's size.

Measured with CLIP ViT-B/32's text embeddings: --model resnet8 --epochs 12 on Tiny-ImageNet-LT's 31,711 images takes
49 min on one core of an AMD EPYC and then tells 23.9 % of Tiny-ImageNet's test images (200 classes) and, zero-shot,
38.9 % of CIFAR-10's, none of whose images it has seen.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.config import Config, load_data
from raylt.core.device import open_device
from raylt.core.training.optimisers import SGD
from raylt.data.augment import crop_flip, normalise
from raylt.data.images import cache
from raylt.data.images.cache import Stored
from raylt.data.sources.sources import Source, channel_statistics, open_source
from raylt.errors import RayltError
from raylt.models import build_model

SCALE = 30.0  # factor of the cosines; CLIP's own value, 100, overfits on such small data sets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("images", "text", "target", "target_text", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--limit", type=int, help="only so many training images, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"], help="of the training")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="as resources.device")
    arguments = parser.parse_args()
    device = open_device(Config.model_validate({"method": "fedavg", "resources": {"device": arguments.device}}))
    source, target = (
        open_source(load_data(None, [f"data.source=npz:{path}"])) for path in (arguments.images, arguments.target)
    )
    text, target_text = (
        F.normalize(torch.from_numpy(np.load(path)).float(), dim=1).to(device)
        for path in (arguments.text, arguments.target_text)
    )
    for path, rows, of in ((arguments.text, text, source), (arguments.target_text, target_text, target)):
        if len(rows) != len(of.class_names):
            raise SystemExit(f"{path}: {len(rows)} rows, {of.name} has {len(of.class_names)} classes")
    side = target.x_train.shape[1]
    torch.manual_seed(arguments.seed)
    tower = Tower(arguments.model, text.shape[1], side, source).to(device)
    fit(tower, source, text, arguments, device)
    accuracy = zero_shot(tower, target, target_text, device)
    trained_on = zero_shot(tower, source, text, device)
    about = (
        f"stand-in for CLIP: {arguments.model} fitted to text embeddings on {arguments.images.stem}, "
        f"{arguments.epochs} epochs, zero-shot {100 * accuracy:.1f} % on {arguments.target.stem}"
    )
    image = encode(tower, target.x_train, device).half().cpu().numpy()
    np.savez(
        arguments.out,
        image=image,
        y=cache.load(target.y_train),
        text=target_text.cpu().numpy(),
        class_names=np.array(target.class_names),
        about=np.array(about),
    )
    print(f"accuracy on the test set of {arguments.images.stem}: {100 * trained_on:.2f} %")
    print(f"zero-shot accuracy on the test set of {arguments.target.stem}: {100 * accuracy:.2f} %")
    print(f"{arguments.out}: {about}")


class Tower(nn.Module):
    """Image tower that shrinks uint8 images [B, H, W, channels] and maps them to unit features [B, d]."""

    def __init__(self, model: str, dim: int, side: int, source: Source):
        super().__init__()
        built = build_model(model, 1, (side, side, source.x_train.shape[3]))
        self.encoder, self.side = built.encoder, side
        self.projection = nn.Linear(built.dim, dim)
        mean, std = channel_statistics(source.x_train)
        self.mean, self.std = nn.Buffer(torch.tensor(mean)), nn.Buffer(torch.tensor(std))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.projection(self.encoder(normalise(x, self.mean, self.std))), dim=1)


def shrink(images: Stored, side: int) -> Tensor:
    """Shrink images uint8 [n, H, W, channels] to [n, side, side, channels] by means over squares.

    H must be a multiple of the side.
    """
    x = cache.load(images)
    assert x.shape[1] % side == 0, f"{x.shape[1]} is no multiple of {side}"
    step, channels = x.shape[1] // side, x.shape[3]
    parts = [
        part.reshape(len(part), side, step, side, step, channels).mean((2, 4)).round().astype(np.uint8)
        for part in np.array_split(x, 1 + len(x) // 2048)
    ]
    return torch.from_numpy(np.concatenate(parts))


def fit(tower: Tower, source: Source, text: Tensor, arguments: argparse.Namespace, device: torch.device) -> None:
    """Train the tower by SGD with momentum 0.9 and a cosine rate; print the remaining time after each epoch."""
    generator = torch.Generator(device).manual_seed(arguments.seed)
    order = torch.Generator().manual_seed(arguments.seed)
    chosen = torch.randperm(len(source.y_train), generator=order)[: arguments.limit].numpy()
    x = shrink(cache.load(source.x_train)[chosen], tower.side).to(device)
    y = torch.from_numpy(cache.load(source.y_train)[chosen]).to(device)
    optimiser = SGD(tower.parameters(), arguments.lr, 0.9, 5e-4)
    steps, done, began = arguments.epochs * -(-len(x) // arguments.batch), 0, time.monotonic()
    for epoch in range(arguments.epochs):
        tower.train()
        total = 0.0
        for rows in torch.randperm(len(x), generator=order).to(device).split(arguments.batch):
            optimiser.lr = arguments.lr * 0.5 * (1 + np.cos(np.pi * done / steps))
            with torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bfloat16"):
                u = tower(crop_flip(x[rows], y[rows], generator)[0])
            loss = F.cross_entropy(SCALE * u.float() @ text.T, y[rows])
            optimiser.step(loss)
            total += loss.item() * len(rows)
            done += 1
        spent = time.monotonic() - began
        print(
            f"epoch {epoch + 1}/{arguments.epochs}  loss {total / len(x):.3f}  {spent:.0f} s, "
            f"{spent / done * (steps - done):.0f} s left",
            flush=True,
        )


@torch.no_grad()
def encode(tower: Tower, images: Stored, device: torch.device) -> Tensor:
    """Return unit features of all images, float32 [n, d]."""
    tower.eval()
    return torch.cat([tower(part.to(device)) for part in shrink(images, tower.side).split(500)])


def zero_shot(tower: Tower, source: Source, text: Tensor, device: torch.device) -> float:
    """Return the share of test images whose nearest text is the text of their class."""
    found = (encode(tower, source.x_test, device) @ text.T).argmax(1).cpu()
    return (found == torch.from_numpy(cache.load(source.y_test))).float().mean().item()


if __name__ == "__main__":
    try:
        main()
    except RayltError as error:
        raise SystemExit(f"error: {error}") from None
