import torch
from tiny import pixels

from raylt.core.client import pixel_features

H, W = 24, 32


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def maps() -> torch.Tensor:
    """Return two maps with class 0 left and class 1 right; the first has one pixel of class 2, and rows are ignored."""
    y = torch.zeros(2, H, W, dtype=torch.int64)
    y[:, :, 20:] = 1
    y[:, :3] = -100
    y[0, 10, 10] = 2
    return y


def test_so_many_pixels_of_each_class_and_image_are_chosen():
    z, y = pixel_features(torch.randn(2, 5, 6, 8), maps(), 7, seeded())
    assert y.tolist() == [0] * 7 + [1] * 7 + [2] + [0] * 7 + [1] * 7
    assert z.shape == (29, 5)


def test_a_classifier_gives_a_chosen_pixel_the_logits_of_its_place():
    torch.manual_seed(0)
    model = pixels(4, (H, W, 3)).eval()
    x = torch.randn(2, 3, H, W)
    y = maps()
    with torch.no_grad():
        logits = model(x)  # [2, 4, H, W]
        z, chosen = pixel_features(model.encoder(x), y, 9, seeded())
        chosen_logits = model.classifier(z)
    # class 2 of the first image is the pixel at (10, 10)
    assert torch.allclose(chosen_logits[chosen == 2], logits[0, :, 10, 10], atol=1e-5)
    # any other chosen logits belong to some pixel of the same class and image
    image = torch.tensor([0] * 19 + [1] * 18)
    for b in range(2):
        for c in range(2):
            drawn = chosen_logits[(image == b) & (chosen == c)]
            of_class = logits[b].movedim(0, -1)[y[b] == c]
            assert (drawn[:, None] - of_class).abs().amax(2).amin(1).max() < 1e-5


def test_the_generator_alone_decides():
    z = torch.randn(2, 5, 6, 8)
    first, again, other = (pixel_features(z, maps(), 7, seeded(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_features_of_images_with_one_label_are_left_as_they_are():
    z, y = torch.randn(6, 5), torch.arange(6)
    assert pixel_features(z, y, 1, seeded()) == (z, y)


def test_chosen_places_are_uniform():
    y = torch.zeros(1, 4, 4, dtype=torch.int64)
    z = torch.arange(16.0).view(1, 1, 4, 4)
    generator = seeded()
    seen = torch.cat([pixel_features(z, y, 4, generator)[0] for _ in range(2000)]).round().long().flatten()
    # each of the 16 pixels is drawn 500 times, with a standard deviation below sqrt(2000 * 0.25) = 22
    assert (torch.bincount(seen, minlength=16) - 500).abs().max() < 110
