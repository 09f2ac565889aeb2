"""Makes a substitute for CLIP features: a pretrained encoder, mapped into CLIP's text space by ridge regression.

    python benchmarks/standin_pretrained.py WEIGHTS FIT.npz FIT_TEXT.npy TARGET.npz TARGET_TEXT.npy OUT.npz

WEIGHTS are those of timm's tf_efficientnet_lite0. FIT and TARGET are npz sources with x_train, y_train, x_test, y_test
and class_names. FIT's images learn the map W = (Z^T Z + penalty I)^-1 Z^T T, where row i of T is the text vector of the
class of image i, and Z and T are centred. OUT is a teacher for method.teacher=npz:OUT: the mapped features of TARGET's
training images. The script prints the zero-shot accuracy on TARGET's test images, which the map never saw. This is no
CLIP: the encoder knows ImageNet's classes, and the map knows FIT's.

Measured with CLIP ViT-B/32's text vectors and `--most 40 --tested 200 --only-judge`: fitted to 7,723 images of
Tiny-ImageNet-LT, it names 52.25 % of 2,000 test images of CIFAR-10 right, zero-shot. The tower of `standin.py`, which
is trained from nothing, names 38.9 %.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.models import build

SIDE = 112
BATCH = 64


@torch.no_grad()
def encode(weights: str, images: np.ndarray) -> Tensor:
    """Return the encoder's features of images uint8 [n, H, W, 3], float32 [n, d]."""
    shape = (images.shape[1], images.shape[2], images.shape[3])
    name = "timm:tf_efficientnet_lite0"
    encoder = build(2, shape, name=name, factory=None, weights=weights, side=SIDE).encoder.eval()
    parts = torch.from_numpy(images).split(BATCH)
    return torch.cat([encoder(part.permute(0, 3, 1, 2).float() / 255) for part in parts])


def fit_map(z: Tensor, target: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Fit a ridge regression from features to text vectors; return its matrix [d, w] and offset [w].

    Args:
        z: features [n, d].
        target: text vector of each image's class, [n, w].
        ridge: penalty, in units of the mean squared feature.
    """
    centre, mean = z.mean(0), target.mean(0)
    centred = (z - centre).double()
    gram = centred.T @ centred
    penalty = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    weight = torch.linalg.solve(gram + penalty, centred.T @ (target - mean).double()).float()
    return weight, mean - centre @ weight


def some_of_each(y: np.ndarray, most: int) -> np.ndarray:
    """Return the rows of at most `most` samples of each class, in order."""
    rng = np.random.default_rng(0)
    rows = [rng.permutation(np.flatnonzero(y == c))[:most] for c in range(int(y.max()) + 1)]
    return np.sort(np.concatenate(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("weights", "fit", "fit_text", "target", "target_text", "out"):
        parser.add_argument(name)
    parser.add_argument("--ridge", type=float, default=1.0)
    parser.add_argument("--most", type=int, default=100, help="images of each class that the map is fitted to")
    parser.add_argument("--tested", type=int, default=10**9, help="test images of each class that are judged")
    parser.add_argument("--only-judge", action="store_true", help="write no teacher")
    chosen = parser.parse_args()

    with np.load(chosen.fit) as fit:
        rows = some_of_each(fit["y_train"], chosen.most)
        z = encode(chosen.weights, fit["x_train"][rows])
        y = torch.from_numpy(fit["y_train"][rows])
    text = F.normalize(torch.from_numpy(np.load(chosen.fit_text)).float(), dim=1)
    weight, offset = fit_map(z, text[y], chosen.ridge)

    target_text = F.normalize(torch.from_numpy(np.load(chosen.target_text)).float(), dim=1)
    with np.load(chosen.target) as target:
        rows = some_of_each(target["y_test"], chosen.tested)
        mapped = encode(chosen.weights, target["x_test"][rows]) @ weight + offset
        # minus the mean text vector, which all classes share
        centred = F.normalize(mapped - offset_of(text, y), dim=1)
        scores = centred @ F.normalize(target_text - target_text.mean(0), dim=1).T
        correct = scores.argmax(1) == torch.from_numpy(target["y_test"][rows])
        print(f"fitted to {len(y):,} images of {len(text)} classes")
        print(f"zero-shot accuracy: {100 * correct.float().mean():.2f} % of {len(rows):,} test images")
        if chosen.only_judge:
            return
        image = encode(chosen.weights, target["x_train"]) @ weight + offset - offset_of(text, y) + target_text.mean(0)
        np.savez(
            Path(chosen.out),
            image=image.numpy().astype(np.float16),
            y=target["y_train"],
            text=target_text.numpy(),
            class_names=target["class_names"],
            about=np.array("EfficientNet-lite0 (ImageNet-1k), mapped by ridge into the text space of CLIP ViT-B/32"),
        )


def offset_of(text: Tensor, y: Tensor) -> Tensor:
    """Return the mean text vector of the images to which the map was fitted, [w]."""
    return text[y].mean(0)


if __name__ == "__main__":
    main()
