"""Measures the speed and memory of decoding a folder of many small images into its cache, against plain Pillow.

    python benchmarks/decoding.py [--images 30000] [--clients 200] [--side 96] [--size 64] [--folder FOLDER]

Makes so many JPEGs in folders <client>/<class>/ unless the folder holds them already, decodes them once with a loop of
Pillow in one thread (open, convert, fit), once into a cache, and once more into a cache whose process is killed half
way and started again. Rates are images per second of CPU time, of all processes that decode with their start, so that
they compare on a machine that is shared.
"""

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import rich.progress  # noqa: F401  (loaded before the clock runs)
from PIL import Image, ImageOps

from raylt.data.images.decoding import fitted_image
from raylt.data.images.image_trees import How, decode_tree
from raylt.data.sources.folders import read_parts

CLASSES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=30_000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--decode", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.decode is not None:
        decode(arguments.folder, arguments.decode, arguments.size)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "images"
        if not folder.exists():
            make(folder, arguments.images, arguments.clients, arguments.side)
        began = time.perf_counter()
        parts = read_parts(folder)
        files = [folder / file for file in parts.train.files]
        print(f"{len(files)} images listed in {time.perf_counter() - began:.2f} s")
        plain = rate_of_pillow(files, arguments.size)
        print(f"Pillow alone, one thread: {plain:,.0f} images per second of CPU")
        root, cores = Path(temporary) / "root", len(os.sched_getaffinity(0))
        figures = in_process(folder, root / "whole", arguments.size)
        ours = len(files) / figures["cpu"]
        print(
            f"into a cache: {ours:,.0f} images per second of CPU, {ours / plain:.2f} of Pillow; "
            f"{figures['seconds']:.1f} s in all with {cores} cores, {figures['cpu']:.1f} s of CPU; peak memory "
            f"{figures['mib']:.0f} MiB, of one of its workers {figures['worker']:.0f} MiB"
        )
        taken = killed(folder, root / "killed", arguments.size, len(files))
        print(
            f"killed after {taken} of {len(files)} images, continued: "
            f"{in_process(folder, root / 'killed', arguments.size)['cpu']:.1f} s of CPU for the rest"
        )
        one, other = (next((root / name).rglob("images.npy")).read_bytes() for name in ("whole", "killed"))
        print(f"the same cache: {'yes' if one == other else 'no'}")


def make(folder: Path, images: int, clients: int, side: int) -> None:
    """Write noisy JPEGs of random colours, distributed evenly over clients and classes."""
    rng = np.random.default_rng(0)
    for i in range(images):
        place = folder / f"client {i % clients:04}" / f"class {i // clients % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 200, 3) + rng.integers(0, 56, (side, side, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i}.jpg", quality=85)


def rate_of_pillow(files: list[Path], size: int) -> float:
    """Return the images that a plain Pillow loop decodes per CPU second."""
    began = time.process_time()
    for file in files:
        with Image.open(file) as image:
            image.draft("RGB", (size, size))
            np.asarray(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR))
    return len(files) / (time.process_time() - began)


def decode(folder: Path, root: Path, size: int) -> None:
    """Decode a folder in this process and print the CPU seconds, seconds and peak memory.

    CPU seconds include those of the workers. The peaks, in MiB, are of this process and of its largest worker.
    """
    files = read_parts(folder).train.files
    fitted_image(folder / files[0], size)  # so that modules are loaded before the clock runs
    cpu, began = time.process_time(), time.perf_counter()
    decode_tree("folder", folder, files, How(size, "auto"), root / "cache")
    own, workers = (resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(
        time.process_time() - cpu + workers.ru_utime + workers.ru_stime,
        time.perf_counter() - began,
        own.ru_maxrss / 1024,
        workers.ru_maxrss / 1024,
    )


def in_process(folder: Path, root: Path, size: int) -> dict[str, float]:
    done = subprocess.run(_command(folder, root, size), check=True, capture_output=True, text=True)
    return dict(zip(("cpu", "seconds", "mib", "worker"), map(float, done.stdout.split()), strict=True))


def killed(folder: Path, root: Path, size: int, images: int) -> int:
    """Kill a decoding process after a third of the images; return the number of images recorded as decoded."""
    process = subprocess.Popen(_command(folder, root, size), stdout=subprocess.DEVNULL)
    while process.poll() is None and _noted(root) < images / 3:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return _noted(root)


def _noted(root: Path) -> int:
    return sum(int(np.count_nonzero(np.fromfile(state, np.uint8))) for state in root.rglob("images.state"))


def _command(folder: Path, root: Path, size: int) -> list[str]:
    return [sys.executable, __file__, "--folder", str(folder), "--decode", str(root), "--size", str(size)]


if __name__ == "__main__":
    main()
