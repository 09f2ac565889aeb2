"""Feature inversion: a decoder network that inverts an encoder, trained on images that no client has (SFD, Fig. 6)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt.seeds import seeded

MAP_CHANNELS = 64  # of the decoder's first map
BATCH = 64


class Decoder(nn.Module):
    """A network that maps features [n, d] to images [n, channels, H, W] in [0, 1].

    A linear layer makes a map of a quarter of the image's height and width, which two transposed convolutions double.
    No layer before this map is narrower than the features, so the decoder can use all information in them even if the
    encoder does not pool.

    Args:
        dim: Width of a feature, d.
        shape: Height, width and channels of an image.
    """

    def __init__(self, dim: int, shape: tuple[int, int, int]):
        super().__init__()
        self.height, self.width, channels = shape
        self.start = MAP_CHANNELS, -(-self.height // 4), -(-self.width // 4)
        self.first = nn.Sequential(nn.Linear(dim, self.start[0] * self.start[1] * self.start[2]), nn.ReLU())
        self.rest = nn.Sequential(
            nn.ConvTranspose2d(MAP_CHANNELS, MAP_CHANNELS // 2, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(MAP_CHANNELS // 2, MAP_CHANNELS // 4, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(MAP_CHANNELS // 4, channels, 3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, z: Tensor) -> Tensor:
        images = self.rest(self.first(z).unflatten(1, self.start))
        return images[..., : self.height, : self.width]


class Inverter:
    """A trained decoder with the feature scale of its training.

    Args:
        z: Features of outside images, float32 [n, d].
        x: The images, float32 [n, channels, H, W] in [0, 1].
        epochs: Number of epochs of Adam at 1e-3 with a cosine schedule, on the squared error.
        seed: Seed of weights and batches.
    """

    def __init__(self, z: Tensor, x: Tensor, epochs: int = 60, seed: int = 0):
        self.mean = z.mean(0)
        self.std = z.std(0).clamp(min=1e-6)
        with seeded(seed, "decoder", device=z.device):
            self.decoder = Decoder(z.shape[1], (x.shape[2], x.shape[3], x.shape[1])).to(z.device)
            optimiser = torch.optim.Adam(self.decoder.parameters(), 1e-3)
            steps = epochs * math.ceil(len(z) / BATCH)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
            z = (z - self.mean) / self.std
            for _ in range(epochs):
                for rows in torch.randperm(len(z), device=z.device).split(BATCH):
                    optimiser.zero_grad()
                    F.mse_loss(self.decoder(z[rows]), x[rows]).backward()
                    optimiser.step()
                    schedule.step()

    @torch.no_grad()
    def __call__(self, z: Tensor) -> Tensor:
        """Reconstruct images from features [n, d]."""
        return self.decoder.eval()((z - self.mean) / self.std)


def shuffled(x: Tensor, seed: int) -> Tensor:
    """Shuffle images, so that a control decoder learns from features paired with wrong images.

    An attack that is not better than its control proves nothing.

    Args:
        x: Images, [n, channels, H, W].
        seed: Seed of the order.
    """
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)]


def mean_features(gradients: Tensor) -> Tensor:
    """Return the mean feature [d] that the classifier gradient of one class reveals.

    The feature is exact for one sample. For several samples it is a mean weighted by the error of the classifier (Zhu
    et al., NeurIPS 2019; Geiping et al., NeurIPS 2020, Prop. 3.1).

    Args:
        gradients: Gradient of weight and bias, [C, d + 1], with the bias in the last column.
    """
    row = gradients[gradients[:, -1].abs().argmax()]
    return row[:-1] / row[-1]
