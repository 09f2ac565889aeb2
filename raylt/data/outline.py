"""What a run folder keeps of its data: enough to open the run's models where images and labels are gone."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from raylt.data.maps import VOID
from raylt.data.split import Split
from raylt.data.task import Shard, Task
from raylt.typed import closed

Count = Annotated[int, Field(ge=0)]


@closed
class Outline(TypedDict):
    """A task without its images and labels; the fields are those of `Task`, `sizes` the images of each client."""

    name: str
    kind: Literal["classification", "segmentation"]
    class_names: list[str]
    shape: Annotated[list[Count], Field(min_length=3, max_length=3)]
    mean: list[float]
    std: list[float]
    client_names: list[str]
    client_counts: list[list[Count]]
    sizes: list[Count]
    newcomers: list[Count]


OUTLINE = TypeAdapter(Outline)


def outline_of(task: Task) -> Outline:
    """What is kept of a task."""
    return Outline(name=task.name, kind=task.kind, class_names=list(task.class_names), shape=list(task.shape),
                   mean=list(task.mean), std=list(task.std), client_names=list(task.client_names),
                   client_counts=task.client_counts.tolist(), sizes=task.sizes.tolist(),
                   newcomers=list(task.newcomers))


def task_from(outline: Outline, split: Split) -> Task:
    """The task that an outline is of: clients hold as many labels of each class as they did, and images of no pixel.

    Whatever reads images fails with it; a client's model that follows from its state and its counts is what it was.
    """
    height, width, channels = outline["shape"]
    counts = np.array(outline["client_counts"], dtype=np.int64)
    nothing = Shard(np.empty((0, 0, 0, 0), np.uint8), np.empty(0, np.int64))
    shards = tuple(_shard(outline["kind"], size, own) for size, own in zip(outline["sizes"], counts, strict=True))
    return Task(outline["name"], tuple(outline["class_names"]), (height, width, channels), tuple(outline["mean"]),
                tuple(outline["std"]), counts, (), shards, nothing, split, client_names=tuple(outline["client_names"]),
                newcomers=tuple(outline["newcomers"]), kind=outline["kind"])


def _shard(kind: str, size: int, counts: np.ndarray) -> Shard:
    labels = np.repeat(np.arange(len(counts)), counts)
    if kind == "segmentation":                      # as many pixels of each class as all its maps have
        pixels = np.full(size * -(-len(labels) // max(size, 1)), VOID, np.uint8)
        pixels[:len(labels)] = labels
        labels = pixels.reshape(size, -1, 1) if size else np.empty((0, 0, 0), np.uint8)
    return Shard(np.empty((size, 0, 0, 0), np.uint8), labels)
