"""Hypothesis strategies for inputs from users and other people, with usually one thing wrong."""

import copy
import io
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from raylt.config import settings

WORDS = [
    "on",
    "off",
    "yes",
    "no",
    "true",
    "True",
    "null",
    "~",
    "010",
    "0x10",
    "0o7",
    "1:30",
    "1_000",
    "1e5",
    "1e-5",
    "1e400",
    ".inf",
    "-.inf",
    ".nan",
    "nan",
    "+1",
    "-1",
    "0",
    "1",
    "2",
    "3.5",
    "''",
    "'1'",
    "[]",
    "{}",
    "[1, 2]",
    "[2, 1]",
    "{a: 1, a: 2}",
    "&a [1]",
    "*a",
    "!!int '010'",
    "!!python/name:os.system x",
    "<<: {a: 1}",
    "2020-01-01",
    "|",
    ">",
    "-",
    "?",
    ":",
    "#",
    "auto",
    "digits",
    "fedavg",
    "/dev/zero",
    "\x00",
    "\ud7ff",
    "é",
    "9" * 400,
    "1" + "0" * 5000,
    "[" * 60,
    "a: b: c",
    "\t1",
    "dirichlet",
    "iid",
    "classes",
    "average",
    "local",
    "npz:",
    "folder:",
    "npz:/dev/null",
    "../x",
    "-0",
    "1e30",
]
KEYS = [
    *(key for key, _ in settings()),
    "method.mu",
    "method.name",
    "local",
    "data",
    "federation.round",
    "",
    ".",
    "a.b.c",
    "method",
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from([2**63, -1, 0, 1, 2**31, 1e308, -0.0, "010", "1", "", "x" * 5000, True]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
values = st.one_of(
    st.sampled_from(WORDS),
    st.integers().map(str),
    st.floats().map(repr),
    st.text(max_size=10),
    anything.map(lambda value: json.dumps(value, default=str)),
)
overrides = st.tuples(st.sampled_from(KEYS), values)


@st.composite
def bytes_changed(draw: Any, content: bytes) -> bytes:
    """Change the content: flip, remove, repeat or insert some bytes."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "flip", "cut", "drop", "insert", "double", "zero"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + draw(st.integers(1, 20))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "double":
                data[at:at] = data[at : at + 40]
            case "zero":
                data[at : at + 8] = bytes(len(data[at : at + 8]))
    return bytes(data)


@st.composite
def json_changed(draw: Any, tree: Any) -> Any:
    """Change a JSON tree at one place: replace, remove, add or exchange a value."""
    tree = json.loads(json.dumps(tree))
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in list(items):
            places.append((node, key))
            if len(places) < 400:
                walk(value)

    walk(tree)
    node, key = draw(st.sampled_from(places))
    match draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "nudge", "exchange"])):
        case "replace":
            node[key] = draw(anything)
        case "remove":
            del node[key]
        case "add" if isinstance(node, dict):
            node[draw(st.text(max_size=5))] = draw(anything)
        case "add":
            node.append(draw(anything))
        case "nudge" if type(node[key]) in (int, float):
            node[key] += draw(st.sampled_from([1, -1, 0.5, 1e-9]))
        case "exchange":
            other, place = draw(st.sampled_from(places))
            if isinstance(other, dict | list) and (place in other if isinstance(other, dict) else place < len(other)):
                node[key] = json.loads(json.dumps(other[place]))
    return tree


def picture(form: str = "PNG", size: tuple[int, int] = (9, 8), mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    Image.fromarray(np.arange(np.prod(shape), dtype=np.uint8).reshape(shape), mode).save(stream, form)
    return stream.getvalue()


def claims(width: int, height: int) -> bytes:
    """Return a PNG whose header claims another size than its content has."""
    import struct
    import zlib

    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + picture()[33:]


ARRAYS = {
    "x_train": np.arange(40 * 64, dtype=np.uint8).reshape(40, 8, 8),
    "y_train": np.arange(40) % 2,
    "x_test": np.arange(6 * 64, dtype=np.uint8).reshape(6, 8, 8),
    "y_test": np.arange(6) % 2,
    "class_names": np.array(["a", "b"]),
}
arrays_of_any_kind = st.one_of(
    st.sampled_from(["?", "i1", "u1", "<i8", ">i8", "f4", "f8", "c8", "U3", "S3", "M8[s]", "V4", "f2", "u8"]).flatmap(
        lambda kind: st.lists(st.integers(0, 9), max_size=3).map(lambda shape: np.zeros(shape, kind))
    ),
    st.sampled_from(
        [
            np.full(40, -1),
            np.full(40, 2),
            np.full(40, 2**40),
            np.zeros(40, dtype=object),
            np.array(["a", "a"]),
            np.array(["", "\n"]),
            np.array([]),
            np.zeros((40, 0, 8), np.uint8),
            np.zeros((40, 8, 8, 5), np.uint8),
            np.zeros((0, 8, 8), np.uint8),
            np.zeros((41, 8, 8), np.uint8),
        ]
    ),
)


@st.composite
def npz_changed(draw: Any) -> bytes:
    arrays = dict(ARRAYS)
    stream = io.BytesIO()
    how = draw(st.sampled_from(["array", "array", "array", "bytes", "bytes", "header"]))
    if how == "array":
        key = draw(st.sampled_from([*ARRAYS, "id_train", "more"]))
        if draw(st.booleans()) or key not in arrays:
            arrays[key] = draw(arrays_of_any_kind)
        else:
            del arrays[key]
    np.savez(stream, **arrays)
    if how == "bytes":
        return draw(bytes_changed(stream.getvalue()))
    if how == "header":
        import zipfile

        key, shape = (
            draw(st.sampled_from(list(ARRAYS))),
            draw(
                st.sampled_from(
                    ["(1099511627776,)", "(40, 1000000000, 8)", "(-1,)", "(40,8", "(2**40,)", "(True,)", "()"]
                )
            ),
        )
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(stream.getvalue())) as old, zipfile.ZipFile(out, "w") as new:
            for name in old.namelist():
                content = old.read(name)
                if name == f"{key}.npy":
                    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
                    content = content[:6] + b"\x01\x00" + len(head).to_bytes(2, "little") + head + content[128:]
                new.writestr(name, content)
        return out.getvalue()
    return stream.getvalue()


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of keys to every place of a tree, but only the first of a list's similar entries."""
    seen = set()
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        if isinstance(tree, list):
            kind = type(value).__name__, frozenset(value) if isinstance(value, dict) else None
            if kind in seen:
                continue
            seen.add(kind)
        yield (*path, key)
        yield from places(value, (*path, key))


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a tree with another value at one place."""
    tree = copy.deepcopy(tree)
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return tree


ODD = [
    math.inf,
    math.nan,
    -1,
    0,
    1e308,
    10**20,
    10**400,
    "x",
    "",
    "\x1b[2J",
    "a\nb",
    "../x",
    "x" * 300,
    True,
    None,
    [],
    {},
    [[]],
    [1, 1],
    {"": 1},
    list(range(300)),
]
