"""Images that Ray Data reads (`data.source=ray:PATH`): Parquet, WebDataset tars or image files, at a path or a URI.

    PATH/*.parquet or a file     columns with images (bytes of files, or arrays), classes and clients
    PATH/*.tar or a file         members KEY.jpg (or .png, ..) with the class in KEY.cls and more columns in KEY.NAME
    PATH/<class>/<image>         or <client>/<class>/<image>, as for folder:

Folders `train` and `test` at the top are the parts; without them all rows are training rows. A separate process runs
Ray Data (actors/data_reader.py), whose tasks decode the images on every node. It writes the rows, in the order of the
file names, to the cache of decoded images. So this process holds no pixels, and each actor maps its clients' images.
When the data set is opened again, the cache is read without Ray.
"""

import io
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import numpy as np

from raylt.config import DataConfig
from raylt.data.images.cache_builder import BAD, COLOUR, GREY, bad_rows, place_of
from raylt.data.images.decoding import Undecodable, eight_bits, fitted_image, full_scale, read_npz
from raylt.data.images.image_files import SUFFIXES, Listing, shown_name
from raylt.data.images.image_trees import FORMAT, How, usable
from raylt.data.sources.arrays import Source
from raylt.data.sources.folders import Part, check_same_names, part_of
from raylt.data.sources.labels import CodedLabels, assemble_coded, not_classes, plain_kind
from raylt.errors import ConfigError, DataError, RayltError, count_of
from raylt.own_code.child_process import start_python
from raylt.store import folder_for

INDEX = "index.npz"  # file next to the images in the cache: class and client of each row
LAYOUT = "Give one kind of files: .parquet, .tar, or images as <class>/<image> or <client>/<class>/<image>."
BATCH_BYTES = 2**23  # size of a batch of decoded images
READER = "from raylt.own_code.top_level_names import claim; claim(); from actors.data_reader import main; main()"

FileKind = Literal["parquet", "webdataset", "images"]
BY_SUFFIX: dict[str, FileKind] = {".parquet": "parquet", ".tar": "webdataset"}


class StoredFile(NamedTuple):
    """A file of the data set: its path below the address, size in bytes, and modification time in ns."""

    path: str
    size: int
    changed: int


@dataclass(frozen=True)
class Reading:
    """A request to the process that reads a `ray:` source into its cache.

    Args:
        name: `data.source`.
        address: Path or URI of the source.
        kind: Format of all files.
        train, test: Paths of the files of each part below the address; `test` is None without a test part.
        how: Settings for decoding.
        image, label, client: Names of the columns as configured.
        array: Path of the array to make.
        sized: Whether the user set a size, which is not possible for arrays.
    """

    name: str
    address: str
    kind: FileKind
    train: tuple[str, ...]
    test: tuple[str, ...] | None
    how: How
    image: str | None
    label: str | None
    client: str | None
    array: Path
    sized: bool


def open_ray(config: DataConfig) -> Source:
    """Open the data set at the path or URI that `config` names.

    Raises:
        ConfigError: A column or part is unknown, or arrays have a size that differs from `data.size`.
        DataError: There are no files, their layout is unknown, their labels are not classes, or images cannot be
            decoded.
        RayltError: The process that runs Ray Data died.
    """
    address = config.source.partition(":")[2]
    if "://" not in address:
        address = str(Path(address).expanduser().absolute())
    files, remarks = _list_parts(config, address)
    train, test = files
    kind = _kind(config.source, [*train, *(test or ())])
    how = How(config.size, config.channels, config.fit, config.bad, config.depth)
    columns = [config.image_column, config.label_column, config.client_column]
    key = [FORMAT, address, how.size, how.channels, how.fit, how.depth, columns, train, test]
    array = place_of("ray", key, Path(config.root).expanduser() / "cache") / "images.npy"
    reading = Reading(
        name=config.source,
        address=address,
        kind=kind,
        train=tuple(file.path for file in train),
        test=None if test is None else tuple(file.path for file in test),
        how=how,
        image=config.image_column,
        label=config.label_column,
        client=config.client_column,
        array=array,
        sized=config.size != DataConfig.model_fields["size"].default,
    )
    if not array.exists():
        _call_reader(reading)
    labels, deep = _read_index(array.with_name(INDEX))
    with folder_for(array.parent) as folder:
        bad = bad_rows(folder, array)
    x, rows, damaged = usable(array, len(labels.classes), bad, how, lambda row: deep)
    return assemble_coded(config.source, x, rows, labels, (*remarks, *damaged))


def _call_reader(reading: Reading) -> None:
    """Make a data set's cache of decoded images in a separate process.

    Ray must not be imported in this process before a run opens its own session.
    """
    channel, remote = Pipe()
    process = start_python(
        "-c",
        READER,
        str(remote.fileno()),
        environment={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(remote.fileno(),),
    )
    remote.close()
    try:
        channel.send(reading)
        problem = channel.recv()
    except (EOFError, OSError):
        raise RayltError(
            f"data.source: the process that reads {reading.name} has died (exit code {process.wait()}). Run the same "
            "command again; if it dies again, free memory.",
            code="data.decoding-failed",
            key="data.source",
            value=reading.name,
        ) from None
    finally:
        channel.close()  # ends the process if it is still running
        process.wait()
    if problem is not None:
        raise problem


def file_system(address: str) -> tuple[Any, str]:
    """Return pyarrow's file system for an absolute path or URI, and the path in it.

    Raises:
        DataError: pyarrow cannot read the URI.
    """
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem, LocalFileSystem

    if "://" not in address:
        return LocalFileSystem(), address
    try:
        return FileSystem.from_uri(address)
    except (ArrowException, OSError, ValueError) as error:
        raise _not_found(address, _cause(error)) from None


def _list_parts(
    config: DataConfig, address: str
) -> tuple[tuple[list[StoredFile], list[StoredFile] | None], tuple[str, ...]]:
    """Return the files of the training and the test part, sorted by path, and notes on what is not read."""
    listed = _list(address)
    files = [file for file in listed if _kind_of(config.source, file) is not None]
    if not files:
        raise _wrong_layout(config.source, listed)
    read = set(files)
    others = Counter(PurePosixPath(file.path).suffix or "without a suffix" for file in listed if file not in read)
    kinds = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(5))
    notes = (f"{count_of(others.total(), 'file')} of other kinds were left out: {kinds}",) if others else ()
    tops = {file.path.partition("/")[0] for file in files if "/" in file.path}
    test = config.test_part or "test"
    if config.test_part is not None and ("train" not in tops or config.test_part not in tops - {"train"}):
        raise ConfigError(
            f"data.test_part: {config.source} has no folder of test rows with this name next to a folder train "
            f"({config.test_part}). Use one of {', '.join(sorted(tops - {'train'})) or 'none'}.",
            code="config.unknown-name",
            key="data.test_part",
            value=config.test_part,
        )
    if "train" not in tops:
        return (files, None), notes
    train = [file for file in files if file.path.startswith("train/")]
    tested = [file for file in files if file.path.startswith(f"{test}/")]
    unread = sorted({file.path.partition("/")[0] for file in files} - {"train", test})
    if unread:
        notes += (f"{config.source}: only train and {test} are read, not {', '.join(unread[:5])}",)
    return (train, tested or None), notes


def _list(address: str) -> list[StoredFile]:
    """List the files at an address, sorted by path; files and folders whose names begin with . or _ are left out."""
    from pyarrow import ArrowException
    from pyarrow.fs import FileSelector, FileType

    system, path = file_system(address)
    try:
        top = system.get_file_info(path)
        if top.type == FileType.File:
            return [StoredFile("", top.size, top.mtime_ns or 0)]
        if top.type == FileType.NotFound:
            raise _not_found(address, "no such file or folder")
        entries = system.get_file_info(FileSelector(path, recursive=True))
    except (ArrowException, OSError) as error:
        raise _not_found(address, _cause(error)) from None
    root = PurePosixPath(path)
    files = []
    for entry in entries:
        inner = PurePosixPath(entry.path).relative_to(root)
        if entry.type == FileType.File and not any(part[0] in "._" for part in inner.parts):
            files.append(StoredFile(str(inner), entry.size, entry.mtime_ns or 0))
    if not files:
        raise _not_found(address, "the folder holds no files")
    return sorted(files)


def _cause(error: BaseException) -> str:
    return " ".join(str(error).split())


def _not_found(address: str, cause: str) -> DataError:
    return DataError(
        f"data.source: nothing to read at {address} ({cause}). Give a path, or a URI that pyarrow reads, such as "
        "s3://BUCKET/FOLDER.",
        code="data.not-found",
        key="data.source",
        value=f"ray:{address}",
        cause=cause,
    )


def _kind_of(name: str, file: StoredFile) -> FileKind | None:
    """Return a file's format by its suffix; None if the format is not supported."""
    suffix = PurePosixPath(file.path or name).suffix.lower()
    if suffix in SUFFIXES:
        return "images"
    return BY_SUFFIX.get(suffix)


def _kind(name: str, files: Sequence[StoredFile]) -> FileKind:
    """Return the file format of a data set.

    Raises:
        DataError: Its files have several formats, or the only file is an image.
    """
    examples: dict[FileKind | None, StoredFile] = {_kind_of(name, file): file for file in files}
    kind = next(iter(examples))
    if kind is None or len(examples) > 1 or (files[0].path == "" and kind == "images"):
        raise _wrong_layout(name, [*examples.values()])
    return kind


def _wrong_layout(name: str, files: Sequence[StoredFile]) -> DataError:
    shown = ", ".join(shown_name(file.path or name) for file in files[:3])
    return DataError(
        f"data.source: the files of {name} are not of one supported kind ({shown}). {LAYOUT}",
        code="data.wrong-layout",
        key="data.source",
        value=name,
    )


def image_parts(reading: Reading) -> list[Part]:
    """Read the class and client of each image file from the names of the folders that contain it.

    Raises:
        DataError: The images have another layout.
    """
    top = Path(reading.address)
    parts: list[Part] = []
    for files in (reading.train, reading.test):
        if files is None:
            continue
        below = f"{files[0].partition('/')[0]}/" if reading.test is not None or files[0].startswith("train/") else ""
        inner = tuple(PurePosixPath(file.removeprefix(below)) for file in files)
        depths = {1, 2} if not parts else {1} if parts[0].clients is None else {2}
        parts.append(part_of(top, below, Listing(inner, {}, (), ()), depths))  # pyright: ignore[reportArgumentType]
    if len(parts) > 1:
        check_same_names(top, "class", parts[0].classes, parts[1].classes)
        check_same_names(top, "client", parts[0].clients or (), parts[1].clients or ())
    return parts


@dataclass(frozen=True)
class Columns:
    """The names of a data set's columns, and the shape of its images.

    Args:
        image, label, client: Names of the columns; `label` is None if folders name the classes.
        file: Column with the name of each image, for error messages; None if images have no names.
        shape: [H, W, channels] of images that are arrays; None if they are bytes of files.
        numbers: Whether classes are integers, which are sorted by value.
        client_numbers: The same for clients.
    """

    image: str
    label: str | None
    client: str | None
    file: str | None = None
    shape: tuple[int, int, int] | None = None
    numbers: bool = False
    client_numbers: bool = False

    @property
    def named(self) -> list[str]:
        """Return the names of all columns to read."""
        return [name for name in (self.image, self.label, self.client, self.file) if name is not None]


def find_columns(reading: Reading, first: dict[str, Any]) -> Columns:
    """Find the image, label and client columns by the settings, or by the values in the first row.

    Args:
        reading: The request.
        first: The values of the first row by column, in Ray Data's numpy format.

    Raises:
        ConfigError: A column is unknown, or not exactly one column is of its kind.
        DataError: Labels or clients are neither integers nor strings.
    """
    names = [name for name in first if not name.startswith("__")]
    if reading.kind == "webdataset":
        images = [name for name in names if f".{name.rpartition('.')[2].lower()}" in SUFFIXES]
        labels = [name for name in names if name == "cls"]
    else:
        images = [name for name in names if _is_image(first[name])]
        labels = [name for name in names if plain_kind(first[name]) and name != reading.client]
    client = reading.client and _column(reading, "data.client_column", reading.client, [], names)
    image = _column(reading, "data.image_column", reading.image, images, names)
    label = _column(reading, "data.label_column", reading.label, [name for name in labels if name != image], names)
    numbers = []
    for key, column in (("data.label_column", label), ("data.client_column", client)):
        kind = "text" if column is None or reading.kind == "webdataset" else plain_kind(first[column])
        if kind is None:
            raise not_classes(key, reading.name, first[column or ""])
        numbers.append(kind == "integer")
    shape = None if _content(first[image]) is not None else _shape(reading, image, first[image])
    return Columns(image, label, client, "__key__" if reading.kind == "webdataset" else None, shape, *numbers)


def _column(reading: Reading, key: str, name: str | None, candidates: list[str], names: list[str]) -> str:
    if name is not None and name not in names:
        raise ConfigError(
            f"{key}: {reading.name} has no column of this name ({name}). Use one of {', '.join(names)}.",
            code="config.unknown-name",
            key=key,
            value=name,
            source=reading.name,
        )
    if name is None and len(candidates) != 1:
        raise ConfigError(
            f"{key}: {len(candidates)} columns of {reading.name} are possible. Set {key} to one of "
            f"{', '.join(candidates or names)}.",
            code="config.unknown-name",
            key=key,
            value=None,
            source=reading.name,
        )
    return candidates[0] if name is None else name


def _content(value: Any) -> bytes | None:
    """Return the bytes of an image file from a column's value; None if the value has none."""
    value = value.get("bytes") if isinstance(value, dict) else value
    return value if isinstance(value, bytes) else None


def _is_image(value: Any) -> bool:
    nested = isinstance(value, np.ndarray) and len(value) > 0 and isinstance(value[0], np.ndarray)
    return nested or _content(value) is not None


def _array(value: np.ndarray) -> np.ndarray:
    """Convert nested arrays, which are the values of list columns, to one array.

    Raises:
        ValueError: The lists differ in length.
    """
    if value.dtype != object:
        return value
    return np.stack([_array(part) for part in value]) if len(value) else np.empty(0)


def _shape(reading: Reading, image: str, value: Any) -> tuple[int, int, int]:
    """Return [H, W, channels] of a column of image arrays, given its first array."""
    shape = _dimensions(value)
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] > 4) or 0 in shape:
        raise DataError(
            f"data.image_column: the first value of {image} is not an image ({type(value).__name__} {list(shape)}). "
            "Give the bytes of image files, or arrays [H, W] or [H, W, channels].",
            code="data.malformed",
            key="data.image_column",
            value=image,
        )
    if reading.sized:
        raise ConfigError(
            f"data.size: images of {reading.name} are arrays and keep their own size ({reading.how.size}). Leave "
            "data.size out, or give image files.",
            code="config.conflict",
            key="data.size",
            value=reading.how.size,
            source=reading.name,
        )
    return shape[0], shape[1], shape[2] if len(shape) == 3 else 1


def _dimensions(value: Any) -> tuple[int, ...]:
    try:
        return _array(value).shape
    except (ValueError, TypeError, AttributeError):
        return ()


@dataclass(frozen=True)
class DecodeBatch:
    """Function of a Ray Data task that decodes the images of a batch of rows.

    Args:
        columns: Columns of the data set.
        how: Settings for decoding.
    """

    columns: Columns
    how: How

    @property
    def row(self) -> tuple[int, int, int]:
        """Return the shape of a decoded image, [H, W, channels].

        Grey images may be repeated in three channels.
        """
        grey = self.how.channels == 1
        return self.columns.shape or (self.how.size, self.how.size, 1 if grey else 3)

    @property
    def rows(self) -> int:
        """Return the number of rows in a batch."""
        return max(1, min(1024, BATCH_BYTES // int(np.prod(self.row))))

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Decode a batch.

        Args:
            batch: The columns of the data set; images as bytes, dicts with bytes, or arrays.

        Returns:
            `pixels` uint8 [n, H, W, channels], `state` uint8 [n] as in the cache, `cause` and `file` (text [n]; empty
            if there is none), `deep` bool [n] (only valid for the first row), `label` and `client` unchanged.
        """
        values = batch[self.columns.image]
        count = len(values)
        pixels = np.zeros((count, *self.row), np.uint8)
        states = np.full(count, COLOUR, np.uint8)
        causes = np.full(count, "", dtype=object)
        for position, value in enumerate(values):
            try:
                decoded = self._decode(value)
                pixels[position] = decoded
                if decoded.shape[-1] == 1 and self.columns.shape is None and self.how.channels == "auto":
                    states[position] = GREY
            except Undecodable as error:
                states[position] = BAD
                causes[position] = error.cause
        deep = np.zeros(count, bool)
        content = _content(values[0])
        deep[0] = content is not None and self.how.depth is None and full_scale(content) is not None
        out = {"pixels": pixels, "state": states, "cause": causes, "deep": deep}
        file = self.columns.file
        out["file"] = np.full(count, "", dtype=object) if file is None else batch[file]
        for name, column in (("label", self.columns.label), ("client", self.columns.client)):
            if column is not None:
                out[name] = _texts(batch[column])
        return out

    def _decode(self, value: Any) -> np.ndarray:
        """Decode one image, uint8 [H, W, channels]."""
        if self.columns.shape is None:
            channels = None if self.how.channels == "auto" else self.how.channels
            content = _content(value)
            if not content:
                raise Undecodable("", f"is {type(value).__name__} without bytes")
            return fitted_image(content, self.how.size, channels, self.how.fit, self.how.depth)
        try:
            pixels = _array(value)
            if pixels.dtype.kind not in "iuf":
                raise ValueError(f"is {pixels.dtype}")
            pixels = pixels if pixels.dtype == np.uint8 else eight_bits(pixels, self.how.depth)
        except (ValueError, TypeError, AttributeError) as error:
            raise Undecodable("", _cause(error)) from None
        pixels = pixels if pixels.ndim == 3 else pixels[..., None]
        if pixels.shape != self.columns.shape:
            raise Undecodable("", f"is {list(pixels.shape)}, the first image {list(self.columns.shape)}")
        return pixels


def _texts(values: np.ndarray) -> np.ndarray:
    """Return class or client names with bytes decoded to text. Other values stay unchanged."""
    if values.dtype == object and any(isinstance(value, bytes) for value in values):
        texts = [value.decode("utf-8", "replace").strip() if isinstance(value, bytes) else value for value in values]
        return np.array(texts, dtype=object)
    return values


def index_bytes(labels: CodedLabels, deep: bool) -> bytes:
    """Return a cache's labels as the bytes of the cache's index file."""
    content = io.BytesIO()
    clients = {}
    if labels.clients is not None and labels.client_names is not None:
        clients = {"clients": labels.clients.astype(np.int32), "client_names": np.array(labels.client_names)}
    np.savez(
        content,
        classes=labels.classes.astype(np.int32),
        class_names=np.array(labels.class_names),
        train=np.array(labels.train),
        flags=np.array([labels.tested, deep]),
        **clients,
    )
    return content.getvalue()


def _read_index(path: Path) -> tuple[CodedLabels, bool]:
    """Return the labels of a cache, and whether its first image has greys of more than 8 bits."""
    stored = read_npz(path, ("classes", "class_names", "train", "flags", "clients", "client_names"))
    labels = CodedLabels(
        classes=stored["classes"].astype(np.int64),
        class_names=stored["class_names"].tolist(),
        clients=stored["clients"].astype(np.int64) if "clients" in stored else None,
        client_names=stored["client_names"].tolist() if "client_names" in stored else None,
        train=int(stored["train"]),
        tested=bool(stored["flags"][0]),
    )
    return labels, bool(stored["flags"][1])
