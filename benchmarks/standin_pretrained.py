"""Makes a stand-in for CLIP's image features: a pretrained encoder, and a small network from its features to texts.

    python benchmarks/standin_pretrained.py WEIGHTS FIT.npz FIT_TEXT.npy TARGET.npz TARGET_TEXT.npy OUT.npz

WEIGHTS are those of timm's tf_efficientnet_lite0. FIT and TARGET are npz sources with x_train, y_train, x_test, y_test
and class_names; row c of a text file is the text vector of class c. FIT's training images teach two layers that map
features z to text vectors by cross-entropy over scaled cosines:

    u = head(z) / |head(z)|,  logits = 10 u^T a_c / |a_c|,  a_c = t_c - mean(t)

The mean of the texts is taken off because all texts share it. OUT is a teacher for method.teacher=npz:OUT, with the
vector b + r u for each training image of TARGET. b is the direction that is equally close to all of TARGET's texts, so
that u alone decides between classes. FedSM and CLIP2FL give cosines the scale 100, and r is the length at which this
scale fits a tenth of FIT's images best. No image and no label of TARGET is learned from. The
script prints the zero-shot accuracy on TARGET's test images. The result is no CLIP: the encoder knows ImageNet's
classes, and the head knows FIT's.

Measured with CLIP ViT-B/32's texts, fitted to 10,787 images of Tiny-ImageNet-LT: the teacher names 59.03 % of
CIFAR-10's 10,000 test images right (with --side 112 54.88 %). By frequency in CIFAR-10-LT the first four classes have
50.4 %, the next three 76.2 %, the last three 53.4 %. The tower of `standin.py`, which is trained from nothing, names
38.9 %. Encoding takes about 15 ms an image at 160 pixels on one core.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.models import build

BATCH = 64
HIDDEN = 512
EPOCHS = 15
SCALE = 10.0  # of the cosines that the head learns with
TEACHER_SCALE = 100.0  # of FedSM's and CLIP2FL's teachers
LENGTHS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.2)  # tried for r


@torch.no_grad()
def encode(weights: str, images: np.ndarray, side: int) -> Tensor:
    """Return the encoder's features of images uint8 [n, H, W, 3], resized to `side`, float32 [n, d]."""
    shape = (images.shape[1], images.shape[2], images.shape[3])
    name = "timm:tf_efficientnet_lite0"
    encoder = build(2, shape, name=name, factory=None, weights=weights, side=side).encoder.eval()
    parts = torch.from_numpy(images).split(BATCH)
    return torch.cat([encoder(part.permute(0, 3, 1, 2).float() / 255) for part in parts])


def shrink(images: np.ndarray, side: int) -> np.ndarray:
    """Return images uint8 [n, H, H, 3] with the given side, by means over squares. H must be a multiple of it."""
    step = images.shape[1] // side
    squares = images.reshape(len(images), side, step, side, step, 3)
    return squares.mean((2, 4)).round().astype(np.uint8)


def some_of_each(y: np.ndarray, most: int) -> np.ndarray:
    """Return the rows of at most `most` samples of each class, in order."""
    rng = np.random.default_rng(0)
    rows = [rng.permutation(np.flatnonzero(y == c))[:most] for c in range(int(y.max()) + 1)]
    return np.sort(np.concatenate(rows))


def centred(text: Tensor) -> Tensor:
    """Return the directions of unit text vectors [C, w] from their mean, of length 1."""
    return F.normalize(text - text.mean(0), dim=1)


class Head(nn.Module):
    """Two layers from features [n, d] to unit vectors [n, w], the directions from the mean text.

    Args:
        z: features that the head will be fitted to; they give the mean and deviation of each feature.
        width: length of a text vector.
    """

    def __init__(self, z: Tensor, width: int):
        super().__init__()
        self.mean, self.deviation = z.mean(0), z.std(0) + 1e-3
        drop = nn.Dropout(0.3)
        self.layers = nn.Sequential(drop, nn.Linear(z.shape[1], HIDDEN), nn.ReLU(), drop, nn.Linear(HIDDEN, width))

    def forward(self, z: Tensor) -> Tensor:
        return F.normalize(self.layers((z - self.mean) / self.deviation), dim=1)


def fit_head(z: Tensor, y: Tensor, text: Tensor) -> Head:
    """Fit a head to the texts of the images' classes by AdamW with a cosine rate.

    Args:
        z: features [n, d].
        y: labels [n].
        text: unit text vectors [C, w].
    """
    torch.manual_seed(0)
    head, axes = Head(z, text.shape[1]), centred(text)
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=0.1)
    batch = 2 * BATCH
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS * -(-len(z) // batch))
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(z)).split(batch):
            loss = F.cross_entropy(SCALE * head(z[rows]) @ axes.T, y[rows], label_smoothing=0.1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            rate.step()
    return head.eval()


@torch.no_grad()
def best_length(head: Head, z: Tensor, y: Tensor, text: Tensor) -> float:
    """Return the r at which a teacher's logits for images, at the scale 100, have the smallest cross-entropy."""
    losses = {r: F.cross_entropy(teacher_logits(head, z, text, r), y).item() for r in LENGTHS}
    return min(losses, key=lambda r: losses[r])


def teacher_logits(head: Head, z: Tensor, text: Tensor, r: float) -> Tensor:
    """Return 100 times the cosines of images and unit text vectors [C, w], [n, C]."""
    return TEACHER_SCALE * F.normalize(image_vectors(head, z, text, r), dim=1) @ text.T


@torch.no_grad()
def image_vectors(head: Head, z: Tensor, text: Tensor, r: float) -> Tensor:
    """Return b + r u for features z [n, d], [n, w]; b has the same inner product with each of the texts [C, w]."""
    shared = F.normalize(torch.linalg.pinv(text).sum(1), dim=0)
    return shared + r * head(z)


def load_texts(path: str) -> Tensor:
    return F.normalize(torch.from_numpy(np.load(path)).float(), dim=1)


def print_accuracy(logits: Tensor, y: Tensor, names: list[str]) -> float:
    """Print the accuracy of each class and return the mean over images."""
    correct = (logits.argmax(1) == y).float()
    for c, name in enumerate(names):
        print(f"{name:>16} {100 * correct[y == c].mean():6.2f} %")
    print(f"zero-shot accuracy: {100 * correct.mean():.2f} % of {len(y):,} test images")
    return correct.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("weights", "fit", "fit_text", "target", "target_text", "out"):
        parser.add_argument(name)
    parser.add_argument("--side", type=int, default=160, help="side to which images are resized for the encoder")
    parser.add_argument("--most", type=int, default=60, help="images of each class that the head is fitted to")
    chosen = parser.parse_args()

    text, target_text = load_texts(chosen.fit_text), load_texts(chosen.target_text)
    with np.load(chosen.target) as target:
        images, test = target["x_train"], target["x_test"]
        labels, truth = target["y_train"], torch.from_numpy(target["y_test"])
        names = target["class_names"]
    with np.load(chosen.fit) as fit:
        rows = some_of_each(fit["y_train"], chosen.most)
        z = encode(chosen.weights, shrink(fit["x_train"][rows], images.shape[1]), chosen.side)
        y = torch.from_numpy(fit["y_train"][rows])
    head, r = fit_and_scale(z, y, text)
    print(f"fitted to {len(y):,} images of {len(text)} classes, r = {r}")
    found = teacher_logits(head, encode(chosen.weights, test, chosen.side), target_text, r)
    accuracy = print_accuracy(found, truth, names.tolist())
    image = image_vectors(head, encode(chosen.weights, images, chosen.side), target_text, r)
    write_teacher(Path(chosen.out), image, labels, target_text, names, accuracy)


def fit_and_scale(z: Tensor, y: Tensor, text: Tensor) -> tuple[Head, float]:
    """Return a head that was fitted to nine tenths of the images, and the r that fits the others best."""
    held = torch.arange(len(z)) % 10 == 0
    head = fit_head(z[~held], y[~held], text)
    return head, best_length(head, z[held], y[held], text)


def write_teacher(file: Path, image: Tensor, y: np.ndarray, text: Tensor, names: np.ndarray, accuracy: float) -> None:
    """Write a teacher's features of training images [n, w] with labels [n], texts [C, w] and class names [C]."""
    about = (
        "stand-in for CLIP: EfficientNet-lite0 (ImageNet-1k) with a head fitted to text embeddings, zero-shot "
        f"{100 * accuracy:.1f} %"
    )
    np.savez(
        file, image=image.numpy().astype(np.float16), y=y, text=text.numpy(), class_names=names, about=np.array(about)
    )


if __name__ == "__main__":
    main()
