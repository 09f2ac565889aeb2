"""Runs of a few seconds on the digits in this process, for tests that read run folders."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import raylt
from raylt.config import load
from raylt.contract.case import WithPrompts, make_scenes, pixels
from raylt.methods import METHODS
from raylt.models import MODELS, SplitModel
from raylt.runs.callbacks.base import Callback

# small values for fields that only decide how long a method computes
QUICK: dict[str, dict[str, Any]] = {
    "sfd": {"rf_dim": 60, "m_min": 80, "m_max": 120, "synthesis_steps": 3, "retrain_epochs": 2},
    "creff": {"per_class": 5, "matching_steps": 3, "retrain_epochs": 2},
    "ccvr": {"virtual": 20, "retrain_epochs": 2},
    "clip2fl": {"per_class": 5, "matching_steps": 3, "retrain_epochs": 2, "kd": 0, "contrast": 0},
    "noisymeans": {"virtual": 20, "retrain_epochs": 2},
    "oracle": {"virtual": 20, "retrain_epochs": 2},
    "rucr": {"retrain_rounds": 1, "size": 5, "retrain_epochs": 2},
    "fedloge": {"steps": 20},
    "fedetf": {"turns": 1, "turn_epochs": 1},
    "fedrela": {"after": 0.5, "share": 0.2},
    "fedrep": {"head_epochs": 1},
    "fedic": {"steps": 3},
    "pfedme": {"steps": 2},
    "fedafa": {"steps": 2},
    "mupfl": {"m": 5, "tau": 2, "matching_steps": 3},
    "fedsm": {"teacher": "none", "retrain_rounds": 1, "size": 5, "retrain_epochs": 2},
}


def picture(side: int = 12, colour: int = 0) -> bytes:
    """Return the content of a PNG file with random pixels."""
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(colour).integers(0, 255, (side, side, 3), dtype=np.uint8)).save(
        content, "PNG"
    )
    return content.getvalue()


def make_run(folder: Path, name: str, *settings: str) -> raylt.Run:
    """Do a run in `folder/name`; the settings name its method."""
    config = load(None, ["federation.rounds=1", "local.epochs=1", "data.clients=3", *settings])
    return raylt.run(config, out=folder, name=name, fleet="local", quiet=True)


def make_tiny_run(
    folder: Path,
    method: str,
    *settings: str,
    name: str | None = None,
    maps: bool = False,
    callbacks: Sequence[Callback] = (),
) -> raylt.Run:
    """Do a run of a method in well under a second, on 4 classes in 8x8 pictures or 16x16 label maps.

    The data name the client of each image; data.partition=by_id uses this.
    """
    fields = [f"method.{field}={value}" for field, value in QUICK.get(method, {}).items()]
    fields += ["data.auxiliary=2"] if method in ("ratioloss", "fedic") else []  # these methods need auxiliary data
    if needs := needs_of(method):
        fields += [*(f"{key}={value}" for key, value in needs.items()), f"data.root={folder}"]
    file, kind = (
        (_scenes, ["model=tiny_pixels", "data.imbalance=1", "data.partition=classes", "data.beta=2"])
        if maps
        else (_pictures, ["data.imbalance=4"])
    )
    if maps:
        raylt.register(pixels, "tiny_pixels", kind="model")
    config = load(
        None,
        [
            f"method={method}",
            *fields,
            f"data.source=npz:{file(folder)}",
            "data.clients=4",
            *kind,
            "federation.rounds=2",
            "local.epochs=1",
            "local.batch=8",
            *settings,
        ],
    )
    return raylt.run(config, out=folder, name=name or method, fleet="local", quiet=True, callbacks=callbacks)


def needs_of(method: str) -> dict[str, str]:
    """Return the settings of a small model that the method takes, where it does not take every model."""
    if method not in METHODS or not METHODS[method].learns_prompts:
        return {}
    raylt.register(with_texts, "with_texts", kind="model")
    return {"model": "with_texts", "trainable": "classifier"}


def with_texts(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Return the small model with a text tower."""
    return WithPrompts(MODELS["small"])(classes, shape)


def _pictures(folder: Path) -> Path:
    """Save pictures in which class c brightens quadrant c.

    The last of four clients has no image of the last class, and has two test images.
    """
    path = folder / "pictures.npz"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 96), ("test", 42)):
        y, ids = np.arange(n) % 4, np.arange(n) // 4 % 4
        ids[(y == 3) & (ids == 3)] = 0
        if part == "test":
            ids[np.flatnonzero(ids == 3)[2:]] = 1
        x = rng.integers(0, 160, (n, 8, 8, 1))
        for image, c in zip(x, y, strict=True):
            image[4 * (c // 2) :, 4 * (c % 2) :][:4, :4] += 60
        arrays |= {f"x_{part}": x.astype(np.uint8), f"y_{part}": y, f"id_{part}": ids}
    np.savez(
        path,
        **arrays,
        class_names=np.array(["up left", "up right", "low left", "low right"]),
        client_names=np.array(["wien", "graz", "linz", "bregenz"]),
    )
    return path


def _scenes(folder: Path) -> Path:
    path = folder / "scenes.npz"
    task = make_scenes()
    x, y = (np.concatenate([getattr(shard, part) for shard in task.shards]) for part in "xy")
    np.savez(path, x_train=x, y_train=y, x_test=task.test.x, y_test=task.test.y, class_names=np.array(["a", "b", "c"]))
    return path
