"""Import of other tools' index lists as a raylt split (`raylt data --import FILE`, `data.split=FILE`).

    [[0, 5, 7], [1, 2]]                                    JSON: a list for each client
    {"wien": [0, 5, 7], "linz": [1, 2]}                    JSON: lists by name, such as FedLab's client_dict and
                                                           PFLlib's dataidx_map written as JSON
    {"wien": {"train": [0, 5], "test": [7]}, ...}          the same with each client's own test images
    {"clients": ..., "judged": ["linz"]}                   one of the above, and clients that are only judged
    {"users": [...], "user_data": {"wien": {"x": [0, 5], "y": [3, 3]}}}    LEAF, with row numbers as x
    sample,client[,part]                                   CSV: a line for each sample; part is train, test or judged

Rows are numbered from 0 in the training images of the source, in the order of its files. Pickles are never read,
because reading one can run any code.
"""

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raylt import store
from raylt.config import DataConfig
from raylt.data.images.cache import load
from raylt.data.sources.arrays import Source
from raylt.data.splits.draw import test_part
from raylt.data.splits.split import LIMIT, IndexLists, Split, hash_labels
from raylt.errors import CheckpointError, ConfigError, DataError, shorten, without_remedy
from raylt.typed_json import DoubledKey, unique_keys

FORMS = (
    "Give JSON ([[rows], ...], {client: [rows]}, {client: {train: [rows], test: [rows]}}, LEAF's users and user_data "
    "with rows as x), or CSV with the columns sample and client."
)
PARTS = ("train", "test", "judged")
ROW = re.compile("[0-9]{1,18}")


@dataclass
class _Lists:
    """The training and test rows of one client."""

    train: list[Any]
    test: list[Any]
    judged: bool = False
    labels: list[Any] | None = None


def open_split(path: Path, source: Source, config: DataConfig) -> Split:
    """Read a split from a file in raylt's own format, or from index lists of another tool.

    Args:
        path: Path of the file.
        source: The data set.
        config: The settings in `data`, for a test part that must be drawn.

    Raises:
        DataError: The file cannot be read, has another form, or lists rows or labels that the source does not have.
        ConfigError: The file has rows of a source without a test part, from which `data.doubles` removes rows.
    """
    try:
        content = store.read(path, LIMIT)
    except CheckpointError as error:
        raise DataError(
            f"{path}: the split cannot be read ({without_remedy(error)}). Give a file that exists.",
            code="data.not-found",
            path=str(path),
        ) from None
    lists = _lists_in(path, content)
    if lists is None:
        return Split.load(path)
    if config.doubles == "drop" and not len(source.x_test):
        raise ConfigError(
            f"data.doubles: it removes images of {source.name}, so the rows in {path} would be other images (drop). "
            "Set data.doubles=keep, or give a data set with a test part.",
            code="config.conflict",
            key="data.doubles",
            value="drop",
            excludes="data.split",
        )
    return _split_of(path, lists, source, config)


def _lists_in(path: Path, content: bytes) -> dict[str, _Lists] | None:
    """Return the index lists in a file by client; None if the file is in raylt's own format."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _malformed(path, "it is not a text file (pickles are not read). Write the lists as JSON") from None
    if text.lstrip()[:1] not in ("{", "["):
        return _from_csv(path, text)
    try:
        tree = json.loads(text, object_pairs_hook=unique_keys)
    except DoubledKey as doubled:
        raise _malformed(path, str(doubled)) from None
    except (ValueError, RecursionError) as error:
        raise _malformed(path, f"it is not JSON ({' '.join(str(error).split())})") from None
    if isinstance(tree, Mapping) and ("seal" in tree or "labels_sha256" in tree):
        return None
    return _from_json(path, tree)


def _from_json(path: Path, tree: Any) -> dict[str, _Lists]:
    judged: list[Any] = []
    if isinstance(tree, Mapping) and "clients" in tree and tree.keys() <= {"clients", "judged"}:
        judged = tree.get("judged", [])
        tree = tree["clients"]
    if isinstance(tree, Mapping) and "user_data" in tree:
        users, sizes = tree.get("users"), tree.get("num_samples")
        tree = {user: _leaf(path, user, data) for user, data in _mapping(path, tree["user_data"]).items()}
        if users is not None and (not isinstance(users, list) or sorted(map(str, users)) != sorted(tree)):
            raise _malformed(path, f"users and user_data do not have the same names ({shortened(users)})")
        if users is not None and sizes is not None and sizes != [len(tree[str(user)].train) for user in users]:
            raise _malformed(path, f"num_samples does not match the numbers of rows of the users ({shortened(sizes)})")
    elif isinstance(tree, list):
        tree = {str(k): each for k, each in enumerate(tree)}
    lists = {str(name): _client(path, name, each) for name, each in _mapping(path, tree).items()}
    if not isinstance(judged, list):
        raise _malformed(path, f"judged is not a list of clients ({type(judged).__name__})")
    for name in judged:
        if str(name) not in lists:
            raise _malformed(path, f"judged names a client that has no rows ({shortened(name)})")
        lists[str(name)].judged = True
    return lists


def _leaf(path: Path, user: str, data: Any) -> _Lists:
    data = _mapping(path, data)
    for key in ("x", "y"):
        if not isinstance(data.get(key, []), list):
            raise _malformed(path, f"{key} of user {shortened(user)} is not a list")
    rows = [row[0] if isinstance(row, list) and len(row) == 1 else row for row in data.get("x", [])]
    if any(isinstance(row, list | str) for row in rows):
        raise _malformed(path, f"x of user {shortened(user)} has images instead of rows of data.source")
    return _Lists(rows, [], labels=data.get("y"))


def _client(path: Path, name: Any, value: Any) -> _Lists:
    if isinstance(value, _Lists):
        return value
    if isinstance(value, list):
        return _Lists(value, [])
    if isinstance(value, Mapping) and value and value.keys() <= {"train", "test", "val"} and not value.get("val"):
        train, test = value.get("train", []), value.get("test", [])
        if isinstance(train, list) and isinstance(test, list):
            return _Lists(train, test)
    raise _malformed(path, f"the client {shortened(name)} has neither a list of rows nor lists train and test")


def _from_csv(path: Path, text: str) -> dict[str, _Lists]:
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        columns, table = reader.fieldnames or [], list(reader)
    except csv.Error as error:
        raise _malformed(path, f"it is not CSV ({error})") from None
    readable = len({*columns}) == len(columns) and all(map(str.isprintable, columns))
    if not readable or not {"sample", "client"} <= {*columns}:
        raise _malformed(path, f"it has the columns {', '.join(map(shortened, columns[:5])) or 'none'}")
    lists: dict[str, _Lists] = {}
    for number, line in enumerate(table, start=2):
        part = line.get("part") or "train"
        if None in line:  # DictReader's key for values without a column
            raise _malformed(path, f"line {number} has more values than there are columns")
        if not line["client"]:
            raise _malformed(path, f"line {number} names no client")
        if part not in PARTS:
            raise _malformed(
                path, f"line {number} has a part that is not one of {', '.join(PARTS)} ({shortened(part)})"
            )
        client = lists.setdefault(line["client"], _Lists([], []))
        client.judged = client.judged or part == "judged"
        sample = (line["sample"] or "").strip()
        if not ROW.fullmatch(sample):
            raise _malformed(path, f"line {number} has no row number ({shortened(sample)})")
        (client.test if part == "test" else client.train).append(int(sample))
    return lists


def _split_of(path: Path, lists: dict[str, _Lists], source: Source, config: DataConfig) -> Split:
    """Make a split from index lists; draw a test part if neither the lists nor the source have one."""
    if not lists:
        raise _malformed(path, "it has no clients")
    for name in lists:
        if not name.strip() or not name.isprintable():
            raise _malformed(path, f"it has a client whose name is not printable ({shortened(name)})")
    names = sorted(lists, key=int) if all(map(ROW.fullmatch, lists)) else list(lists)
    clients = [_rows(path, name, lists[name].train, source, lists[name].labels) for name in names]
    tested = [_rows(path, name, lists[name].test, source) for name in names]
    _check_once(path, names, [*clients, *tested])
    test = share = pooled = None
    if any(map(len, tested)):
        if len(source.y_test):
            raise _malformed(path, f"it has test rows, and {source.name} has test images of its own. Leave them out")
        test = IndexLists.of(tested)
    elif not len(source.y_test):
        test, share = test_part(source, config)
        assert test is not None
        is_test = np.zeros(len(source.y_train), dtype=bool)
        is_test[test.flat] = True
        clients = [rows[~is_test[rows]] for rows in clients]
        pooled = True
    judged = tuple(k for k, name in enumerate(names) if lists[name].judged)
    if len(judged) == len(names):
        raise _malformed(path, "all of its clients are only judged, and at least one must train")
    return Split(
        clients=IndexLists.of(clients),
        labels_sha256=hash_labels(source.y_train),
        source=source.name,
        imbalance=1.0,
        partition="imported",
        alpha=config.alpha,
        seed=config.seed,
        test=test,
        test_share=share,
        client_names=None if names == [str(k) for k in range(len(names))] else tuple(names),
        test_pooled=pooled,
        judged=judged or None,
    )


def _rows(
    path: Path, name: str, rows: Sequence[Any], source: Source, labels: Sequence[Any] | None = None
) -> np.ndarray:
    """Check a client's rows from the file and return them in ascending order.

    Raises:
        DataError: They are not row numbers of the source, or their labels differ from the source's.
    """
    count = len(source.y_train)
    for row in rows:
        if type(row) is not int:
            raise _malformed(path, f"the client {shortened(name)} has a row that is not a whole number ({row!a:.80})")
        if not 0 <= row < count:
            raise _malformed(
                path, f"the client {shortened(name)} has a row outside 0 to {count - 1}, the training images ({row})"
            )
    array = np.array(rows, dtype=np.int64)
    if labels is not None and source.kind == "classification" and load(source.y_train)[array].tolist() != list(labels):
        raise _malformed(
            path, f"the labels y of a client differ from those of its rows x in {source.name} ({shortened(name)})"
        )
    return np.sort(array)


def _check_once(path: Path, names: Sequence[str], lists: Sequence[np.ndarray]) -> None:
    """Check that there are rows, and that no row is listed twice.

    Args:
        path: Path of the file.
        names: Names of the clients.
        lists: The training rows of each client, followed by the test rows of each client.
    """
    rows = np.concatenate(lists)
    if not len(rows):
        raise _malformed(path, "its clients have no rows")
    owners = np.repeat(np.arange(len(lists)) % len(names), [len(each) for each in lists])
    order = np.argsort(rows, kind="stable")
    twice = np.flatnonzero(np.diff(rows[order]) == 0)
    if not len(twice):
        return
    first, second = order[twice[0]], order[twice[0] + 1]
    both = (names[int(owners[k])] for k in (first, second))
    of = " and ".join(dict.fromkeys(f"the client {shortened(name)}" for name in both))
    raise _malformed(path, f"row {rows[first]} is listed twice, by {of}. Leave it in one list")


def shortened(value: Any) -> str:
    """Return a value from the file as one printable line of at most 80 characters."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return shorten(text)


def _mapping(path: Path, tree: Any) -> Mapping[str, Any]:
    if not isinstance(tree, Mapping):
        raise _malformed(path, f"a value is not a mapping of clients ({type(tree).__name__})")
    return tree


def _malformed(path: Path, problem: str) -> DataError:
    return DataError(f"{path}: {problem}. {FORMS}", code="data.malformed", path=str(path))
