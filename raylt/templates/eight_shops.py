"""Makes image folders of eight shops, as heterogeneous and untidy as real image folders.

Each shop photographs in its own way, few kinds of things sell best, not every shop has every kind, and some files are
odd.

    python eight_shops.py shops
    raylt data data.source=folder:shops data.size=32 data.bad=skip
    raylt run method=fedper data.source=folder:shops data.size=32 data.bad=skip --fleet local

The pictures are drawn, so nothing is downloaded. Each kind of thing has a shape; each shop has a background, a colour
cast and noise.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance

SHOPS = ("Wien", "Linz", "Graz", "Salzburg", "Innsbruck", "Köln Süd", "Bern", "Zürich")
KINDS = ("shirt", "trouser", "dress", "bag", "sneaker", "boot", "hat", "scarf")
SIDE = 48
SHARE = 0.6  # ratio of the images of a kind to the next more frequent one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--most", type=int, default=120, help="images of the most frequent kind in a shop of usual size"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    made = make(arguments.folder, arguments.most, arguments.seed)
    print(f"{made} images and some odd files in {arguments.folder}")


def make(folder: Path, most: int = 120, seed: int = 0) -> int:
    """Write the images as folder/<shop>/<kind>/<number>.jpg, and some odd files.

    Args:
        most: Images of the most frequent kind in a shop of usual size.

    Returns:
        The number of images that can be decoded.
    """
    rng = np.random.default_rng(seed)
    made = 0
    for number, shop in enumerate(SHOPS):
        size = rng.uniform(0.5, 1.5)
        taste = rng.permutation(len(KINDS)) if number % 2 else np.arange(len(KINDS))  # rank of each kind in this shop
        for kind in range(len(KINDS)):
            if rng.random() < 0.15 and taste[kind]:
                continue  # this shop does not sell it
            target = folder / shop / KINDS[kind]
            target.mkdir(parents=True)
            for i in range(max(2, round(most * size * SHARE ** taste[kind]))):
                draw(kind, number, rng).save(target / f"{i:04}.jpg", quality=88)
                made += 1
    return made + add_odd_files(folder, rng)


def draw(kind: int, shop: int, rng: np.random.Generator) -> Image.Image:
    """Draw an object of a kind as a shop would photograph it, RGB [SIDE, SIDE]."""
    ground = np.array([(235, 235, 235), (40, 40, 45), (200, 180, 150), (150, 190, 150)][shop % 4])
    cast = np.array([(1, 1, 1), (1.1, 1, 0.8), (0.8, 1, 1.15)][shop % 3])
    image = Image.new("RGB", (SIDE, SIDE), tuple(ground.tolist()))
    pen = ImageDraw.Draw(image)
    colour = tuple(rng.integers(60, 200, 3).tolist())
    x, y = rng.integers(4, 12, 2).tolist()
    right = x + int(rng.integers(24, 32))
    below = y + int(rng.integers(24, 32))
    middle = (x + right) // 2
    match kind:
        case 0:
            pen.polygon(
                [
                    (x, y),
                    (right, y),
                    (right, y + 9),
                    (right - 6, y + 9),
                    (right - 6, below),
                    (x + 6, below),
                    (x + 6, y + 9),
                    (x, y + 9),
                ],
                colour,
            )
        case 1:
            pen.polygon(
                [
                    (x + 4, y),
                    (right - 4, y),
                    (right - 2, below),
                    (middle + 3, below),
                    (middle, y + 8),
                    (middle - 3, below),
                    (x + 2, below),
                ],
                colour,
            )
        case 2:
            pen.polygon([(middle, y), (right, below), (x, below)], colour)
        case 3:
            pen.rectangle((x, y + 10, right, below), colour)
            pen.arc((x + 6, y, right - 6, y + 20), 180, 360, colour, 3)
        case 4:
            pen.ellipse((x, y + 14, right, below), colour)
        case 5:
            pen.polygon(
                [(x + 4, y), (middle, y), (middle, below - 8), (right, below - 8), (right, below), (x + 4, below)],
                colour,
            )
        case 6:
            pen.pieslice((x + 4, y, right - 4, below), 180, 360, colour)
            pen.rectangle((x, (y + below) // 2, right, (y + below) // 2 + 4), colour)
        case _:
            pen.line([(x, y), (middle, below), (right, y)], colour, 6)
    image = ImageEnhance.Brightness(image).enhance(float(rng.uniform(0.7, 1.2)))
    pixels = np.asarray(image) * cast + rng.normal(0, 4 + 3 * (shop % 3), (SIDE, SIDE, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def add_odd_files(folder: Path, rng: np.random.Generator) -> int:
    """Write files that real folders contain besides photographs; return the number of images among them."""
    shirts = folder / SHOPS[0] / KINDS[0]
    photo = draw(0, 0, rng)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    photo.transpose(Image.Transpose.ROTATE_90).save(shirts / "from a phone.jpg", exif=exif)
    grey = np.asarray(photo.convert("L"), np.uint16) * 257
    Image.fromarray(grey).save(shirts / "16 bits.png")
    photo.convert("CMYK").save(shirts / "for the printer.jpg")
    photo.convert("RGBA").save(shirts / "größe 42.PNG")
    (shirts / "cut off.jpg").write_bytes((shirts / "0000.jpg").read_bytes()[:500])
    (shirts / "Thumbs.db").write_bytes(b"\0" * 64)
    (folder / "readme.txt").write_text("Drawn by eight_shops.py of raylt.\n")
    return 4


if __name__ == "__main__":
    main()
