"""`encode`: replaces the images of a task by precomputed features if the model's encoder is frozen.

With `trainable=classifier` the encoder gives the same features in every round, so it runs once. Features are stored in
a cache below data.root, which all methods, seeds and arms of a study share. Each encoder has its own folder there,
named by a hash of the weights, the preprocessing, the precision and the output for fixed images, so other weights have
another folder. An image is looked up by the hash of its pixels, so splits that share images share features. Each
feature is stored with a checksum, which is compared whenever the feature is read.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.device import all_threads, open_device
from raylt.core.setup import Setup
from raylt.data.augment import Augmentation, draw_view, normalise
from raylt.data.images.cache import Stored, load, take
from raylt.data.images.cache_builder import ABOUT
from raylt.data.task import Holdings, Shard, Task, TaskSpec
from raylt.errors import DataError, quoted
from raylt.models.trainable import FrozenEncoder, frozen_entries, trains_on_features
from raylt.store import Folder, folder_for

BATCH = 64  # batches are padded to this size, since the size affects the last bits of a feature
CHUNK = 1024  # rows per look-up and computation; an interrupted run keeps its complete chunks
KEY_BYTES = 16
CHECKSUM_BYTES = 8
FIXED_VIEWS = 64  # images whose views identify an augmentation; enough to show one that changes few images


def encode(setup: Setup, task: Task, report: Callable[[str], object] = lambda text: None) -> tuple[Setup, Task]:
    """Replace a task's images by precomputed features if the encoder is frozen.

    Otherwise the setup and the task are returned unchanged.

    If `augment` is set, each training sample has 1 + `views` features: one of the image and one of each augmented view.
    The views depend on the pixels alone. A batch takes a random view of each sample.

    Args:
        setup: The run's setup.
        task: The task to encode; a task without pixels, or with features already, is returned unchanged.
        report: Called with a sentence about the encoded images.
    """
    shape = task.test.x.shape
    if not trains_on_features(setup.config.trainable, task.kind) or len(shape) != 4 or 0 in shape:
        return setup, task
    model = setup.new_model(task.spec)
    encoder = next(module for module in model.modules() if isinstance(module, FrozenEncoder))
    device = open_device(setup.config)
    fast = FeatureCache(setup, task.spec, encoder.to(device), device, setup.config.local.precision)
    # models are evaluated in float32, as with images
    exact = fast if fast.precision == "float32" else replace(fast, precision="float32")
    views = 0 if setup.augment is None else setup.config.views
    with all_threads():  # no client computes while images are encoded
        shards = task.shards
        if isinstance(shards, Holdings):
            encoded: Sequence[Shard] = Holdings(fast.shard(shards.whole, views), shards.ends, shards.views)
        else:
            encoded = tuple(fast.shard(shard, views) for shard in shards)
        task = replace(
            task,
            shards=encoded,
            test=exact.shard(task.test),
            validation=None if task.validation is None else exact.shard(task.validation),
            auxiliary=None if task.auxiliary is None else fast.shard(task.auxiliary),
        )
    caches = [fast] if exact is fast else [fast, exact]
    computed = sum(cache.computed for cache in caches)
    from_cache = sum(cache.from_cache for cache in caches)
    random = "; its weights are random, since weights is not set" if setup.has_random_frozen_parts else ""
    report(f"{setup.config.model} is frozen: {computed:,} images encoded, {from_cache:,} found in {fast.path}{random}")
    return replace(setup, augment=draw_view if views else None), task


class FeatureFiles:
    """The features in a cache folder by key. Each file of keys is read once, however many images are looked up.

    A file of keys is uint8 [n, KEY_BYTES + CHECKSUM_BYTES]: a key and the checksum of its feature in each row.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()  # names of the files of keys that were read
        self._places: dict[bytes, tuple[Path, int, bytes]] = {}  # feature file, row and checksum by key

    def __len__(self) -> int:
        return len(self._places)

    def read_new_keys(self, folder: Folder) -> None:
        """Read the keys of the file pairs that this or another process added to the folder since the last call.

        Raises:
            DataError: A file of a pair cannot be read.
        """
        for name in folder.names():
            if not name.startswith("keys.") or name in self._seen:
                continue
            with _readable(folder.path / name):
                keys = np.load(io.BytesIO(folder.read(name)), allow_pickle=False)
            path = folder.path / name.replace("keys.", "features.", 1)
            with _readable(path):
                rows = len(np.load(path, mmap_mode="r", allow_pickle=False))
                if keys.dtype != np.uint8 or keys.shape != (rows, KEY_BYTES + CHECKSUM_BYTES):
                    raise ValueError(f"{rows} features, but keys of type {keys.dtype} and shape {keys.shape}")
            self._seen.add(name)
            self._places |= {
                key[:KEY_BYTES].tobytes(): (path, row, key[KEY_BYTES:].tobytes()) for row, key in enumerate(keys)
            }

    def get(self, keys: Sequence[bytes]) -> dict[bytes, np.ndarray]:
        """Return the features of the given keys that are in the cache.

        Raises:
            DataError: A file that `read_new_keys` read cannot be read any more, or a feature differs from its checksum.
        """
        wanted: dict[Path, dict[bytes, tuple[int, bytes]]] = {}
        for key in keys:
            if key in self._places:
                path, row, checksum = self._places[key]
                wanted.setdefault(path, {})[key] = row, checksum
        features = {}
        for path, rows in wanted.items():
            with _readable(path):
                # copy the rows: a memory map keeps its file open, and there may be more files than a process may open
                stored = np.load(path, mmap_mode="r", allow_pickle=False)
                for key, (row, checksum) in rows.items():
                    features[key] = np.array(stored[row])
                    if _checksum(features[key]) != checksum:
                        raise ValueError(f"row {row} was changed after it was written")
        return features


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert an error that a feature file causes inside the block into a DataError with a remedy."""
    try:
        yield
    except (OSError, ValueError) as error:
        setting = quoted(f"data.root={path.parent.parent.parent}")
        raise DataError(
            f"data.root: the cache of features {path} cannot be read ({error}). Remove it with raylt data "
            f"{setting} --clear-cache {path.parent.name}.",
            code="data.cache-unreadable",
            key="data.root",
            path=str(path),
        ) from None


@dataclass
class FeatureCache:
    """A cache, on disk and in memory, of the features that one encoder computes at one precision.

    Attributes:
        computed: Number of images that the encoder ran on.
        from_cache: Number of images whose features were in the cache.
    """

    setup: Setup
    spec: TaskSpec
    encoder: FrozenEncoder
    device: torch.device
    precision: str
    computed: int = 0
    from_cache: int = 0
    _files: FeatureFiles = field(default_factory=FeatureFiles, init=False)

    @cached_property
    def path(self) -> Path:
        """Return the folder of the cache."""
        root = Path(self.setup.config.data.root).expanduser().absolute()
        return root / "cache" / f"features-{self._key[:16]}"

    @cached_property
    def _key(self) -> str:
        """Return a hash of everything that a feature depends on except the image."""
        entries = {name: value.detach().cpu().contiguous() for name, value in frozen_entries(self.encoder).items()}
        entries["output for fixed images"] = torch.from_numpy(self._fixed)
        about = f"{self.spec.mean}{self.spec.std}{self.spec.shape}{self.precision}{self.device.type}{torch.__version__}"
        layout = f"{KEY_BYTES}+{CHECKSUM_BYTES}"
        return hashlib.sha256(f"{hash_tensors(entries)}{about}{layout}".encode()).hexdigest()

    @cached_property
    def _fixed(self) -> np.ndarray:
        """Return the encoder's features of two fixed images, float32 [2, d], as part of the cache's key."""
        images = torch.randint(0, 256, (2, *self.spec.shape), generator=torch.Generator().manual_seed(0))
        return self._run(images.to(torch.uint8))

    @cached_property
    def _augmentation(self) -> bytes:
        """Return a hash of the augmentation's name and its views of fixed images, as part of the keys of views.

        The name alone is not enough: a user's own augmentation may change and keep its name.
        """
        assert self.setup.augment is not None
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (FIXED_VIEWS, *self.spec.shape), generator=generator).to(torch.uint8)
        x, _ = self.setup.augment(images, torch.zeros(FIXED_VIEWS, dtype=torch.int64), generator)
        return hashlib.sha256(self.setup.config.augment.encode() + x.float().numpy().tobytes()).digest()

    def shard(self, shard: Shard, views: int = 0) -> Shard:
        """Return a client's shard with features, float32 [n, 1 + views, d], in place of images."""
        chunks = [self._chunk(take(shard.x, rows), views) for rows in _chunks(len(shard))]
        none = np.empty((0, 1 + views, self._fixed.shape[1]), np.float32)
        return replace(shard, x=np.concatenate([none, *chunks]))

    def _chunk(self, stored: Stored, views: int) -> np.ndarray:
        images = load(stored)
        plain = [hashlib.blake2b(image.tobytes(), digest_size=KEY_BYTES).digest() for image in images]
        keys = [plain] + [
            [_key_of_view(key, self._augmentation, view) for key in plain] for view in range(1, views + 1)
        ]
        return np.stack([self._view(images, of_view, view) for view, of_view in enumerate(keys)], axis=1)

    def _view(self, images: np.ndarray, keys: list[bytes], view: int) -> np.ndarray:
        """Return the features of one view of images, float32 [n, d], from the cache where possible."""
        with folder_for(self.path) as folder:
            self._files.read_new_keys(folder)
            cached = self._files.get(keys)
            missing = [key for key in dict.fromkeys(keys) if key not in cached]
            self.from_cache += len(keys) - len(missing)
            if missing:
                lock = folder.lock("lock", wait=True)  # arms that start together encode once
                assert lock is not None
                try:
                    self._files.read_new_keys(folder)
                    cached_meanwhile = self._files.get(missing)
                    self.from_cache += len(cached_meanwhile)
                    cached |= cached_meanwhile
                    missing = [key for key in missing if key not in cached]
                    cached |= self._compute(folder, images, keys, missing, view)
                finally:
                    os.close(lock)
        return np.stack([cached[key] for key in keys])

    def _compute(
        self, folder: Folder, images: np.ndarray, keys: list[bytes], missing: list[bytes], view: int
    ) -> dict[bytes, np.ndarray]:
        if not missing:
            return {}
        position = {key: row for row, key in enumerate(keys)}
        missing_images = torch.from_numpy(np.stack([images[position[key]] for key in missing]))
        if view:
            assert self.setup.augment is not None
            missing_images = torch.cat(
                [_augmented(x, key, self.setup.augment) for x, key in zip(missing_images, missing, strict=True)]
            )
        features = np.concatenate([self._run(part) for part in missing_images.split(BATCH)])
        self.computed += len(missing)
        _write(folder, missing, features)
        self._files.read_new_keys(folder)
        about = {
            "of": f"features of {self.setup.config.model}",
            "images": len(self._files),
            "size": max(self.spec.shape[:2]),
        }
        folder.write(ABOUT, json.dumps(about))
        return dict(zip(missing, features, strict=True))

    @torch.no_grad()
    def _run(self, images: Tensor) -> np.ndarray:
        """Return the features of at most BATCH images, float32 [n, d]; pad the batch with black images."""
        n = len(images)
        full = torch.cat([images, images.new_zeros(BATCH - n, *images.shape[1:])]).to(self.device)
        mean, std = (torch.tensor(values, device=self.device) for values in (self.spec.mean, self.spec.std))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            z = self.encoder(normalise(full, mean, std))
        return z[:n].float().cpu().numpy()


def _key_of_view(key: bytes, augmentation: bytes, view: int) -> bytes:
    return hashlib.blake2b(key + augmentation + f" {view}".encode(), digest_size=KEY_BYTES).digest()


def _checksum(feature: np.ndarray) -> bytes:
    return hashlib.blake2b(feature.tobytes(), digest_size=CHECKSUM_BYTES).digest()


def _augmented(image: Tensor, key: bytes, augment: Augmentation) -> Tensor:
    """Return a randomly augmented view of an image, [1, H, W, channels]; `key` seeds the augmentation."""
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    x, _ = augment(image[None], torch.zeros(1, dtype=torch.int64), generator)
    return x.float()


def _write(folder: Folder, keys: Sequence[bytes], features: np.ndarray) -> None:
    """Add features to the cache as a new pair of files.

    The file of keys is written last and makes the pair valid.
    """
    name = hashlib.sha256(b"".join(keys)).hexdigest()[:16]
    rows = [key + _checksum(feature) for key, feature in zip(keys, features, strict=True)]
    packed = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), KEY_BYTES + CHECKSUM_BYTES)
    for kind, array in (("features", features), ("keys", packed)):
        buffer = io.BytesIO()
        np.save(buffer, array)
        folder.write(f"{kind}.{name}.npy", buffer.getvalue())


def _chunks(n: int) -> Iterator[np.ndarray]:
    for start in range(0, n, CHUNK):
        yield np.arange(start, min(start + CHUNK, n))
