"""Small teachers: an open_clip model and a feature file, both with d = 64 like the `small` model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raylt.data.task import Task

DIM = 64
CLIP = {
    "embed_dim": DIM,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "patch_size": 16, "head_width": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
PREPROCESS = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bilinear", "resize_mode": "squash"}


def save_clip(folder: Path, **config: Any) -> None:
    """Write open_clip_config.json, and open_clip_model.safetensors with random weights."""
    import open_clip
    from safetensors.torch import save_file

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = open_clip.CLIP(**CLIP, **config)
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()}, folder / "open_clip_model.safetensors"
    )
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": CLIP | config, "preprocess_cfg": PREPROCESS})
    )


def feature_arrays(task: Task) -> dict[str, np.ndarray]:
    """Return the arrays of a feature file: orthogonal texts, and for each image the text of its class with noise."""
    rng = np.random.default_rng(0)
    text = np.linalg.qr(rng.standard_normal((DIM, DIM)))[0][: task.classes].astype(np.float32)
    y = np.concatenate([shard.y for shard in task.shards])
    image = text[y] + 0.1 * rng.standard_normal((len(y), DIM))
    return {
        "image": image.astype(np.float16),
        "y": y,
        "text": text,
        "class_names": np.array(task.class_names),
        "about": np.array("a stand-in"),
    }


def save_features(path: Path, task: Task, **changes: Any) -> str:
    """Write a feature file without the arrays that are None; return the teacher's name."""
    arrays = feature_arrays(task) | changes
    np.savez(path, **{key: array for key, array in arrays.items() if array is not None})
    return f"npz:{path}"
