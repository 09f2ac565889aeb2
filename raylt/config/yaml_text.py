"""A strict YAML reader and writer: YAML 1.2 scalars, unique keys, no references.

PyYAML reads YAML 1.1, where `on` and `yes` are true, 010 is 8, 1:30 is 90 and 1_000 is 1000, and the last of two equal
keys counts. In raylt these values are strings, which a numeric setting rejects, and equal keys are an error.
"""

import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from raylt.errors import ConfigError

MAX_FILE_BYTES = 2**20
MAX_DEPTH = 30  # Nested levels.
NULL, BOOL, INT, FLOAT, TEXT, LIST, MAP = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")
)
_LOOKS = {
    NULL: re.compile(r"(~|null|Null|NULL|)$"),
    BOOL: re.compile(r"(true|True|TRUE|false|False|FALSE)$"),
    INT: re.compile(r"[-+]?(0|[1-9][0-9]*)$"),
    FLOAT: re.compile(
        r"([-+]?((0|[1-9][0-9]*)?\.[0-9]+|(0|[1-9][0-9]*)\.?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)"
        r"|\.(nan|NaN|NAN))$"
    ),
}


def _fault(what: str, place: yaml.Mark) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, what, place)


class _Reader(yaml.SafeLoader):
    yaml_implicit_resolvers = {None: list(_LOOKS.items())}  # noqa: RUF012 - a class attribute of PyYAML

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise _fault("*name is a reference to another value; repeat the value", self.peek_event().start_mark)
        self.depth = getattr(self, "depth", 0) + 1
        if self.depth > MAX_DEPTH:
            raise _fault(f"more than {MAX_DEPTH} levels; remove some", self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def scalar(self, node: yaml.ScalarNode) -> Any:
        """Return the value of a YAML scalar, with or without an explicit tag."""
        text, looks = node.value, _LOOKS.get(node.tag)
        if looks is not None and not looks.match(text):
            raise _fault(f"{text[:40]!r} does not fit its tag; remove the tag", node.start_mark)
        if node.tag == INT and len(text) > 300:
            raise _fault("a number of more than 300 digits; shorten it", node.start_mark)
        if node.tag == FLOAT:
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        return {NULL: lambda: None, BOOL: lambda: text.lower() == "true", INT: lambda: int(text)}[node.tag]()

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        """Return a YAML mapping after checking that its keys are strings and unique."""
        tree: dict[str, Any] = {}
        for key, value in node.value:
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str):
                raise _fault(f"the key {str(name)[:40]} is not a name; quote it", key.start_mark)
            if name in tree:
                raise _fault(f"the key {name} occurs twice; remove one", key.start_mark)
            tree[name] = self.construct_object(value, deep=True)
        return tree


_Reader.yaml_constructors = {
    **dict.fromkeys((NULL, BOOL, INT, FLOAT), _Reader.scalar),
    TEXT: yaml.SafeLoader.construct_scalar,
    LIST: lambda reader, node: [reader.construct_object(item, deep=True) for item in node.value],
    MAP: _Reader.mapping,
    None: yaml.SafeLoader.construct_undefined,
}


class _Writer(yaml.SafeDumper):
    """A YAML writer that quotes strings that a YAML reader would interpret as another type."""

    yaml_implicit_resolvers = {
        first: [*looks, *_LOOKS.items()] for first, looks in yaml.SafeDumper.yaml_implicit_resolvers.items()
    } | {None: list(_LOOKS.items())}


def parse(text: str) -> Any:
    """Parse a YAML text and return its value.

    Raises:
        ValueError: The text is not YAML. The message is one line with line and column.
    """
    try:
        return yaml.load(text, _Reader)
    except yaml.YAMLError as error:
        raise ValueError(_described(error)) from None
    except RecursionError:
        raise ValueError(f"more than {MAX_DEPTH} levels; remove some") from None


def write(tree: Any) -> str:
    """Return a value as YAML text with its keys in order. `parse` returns the same value."""
    return yaml.dump(tree, Dumper=_Writer, sort_keys=False)


def read_file(path: Path) -> Any:
    """Read a YAML file and return its value.

    Raises:
        ConfigError: The file does not exist, is not a plain file of at most 1 MiB, or is not YAML.
    """
    try:
        content = _content(path)
        return parse(content.decode())
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). Give a YAML file that can be read.",
            code="file.not-found" if isinstance(error, FileNotFoundError) else "file.unreadable",
            path=str(path),
        ) from None
    except ValueError as error:  # including UnicodeDecodeError
        raise ConfigError(
            f"{path}: is not YAML ({error}). Correct it, or give another file.", code="file.malformed", path=str(path)
        ) from None


def _content(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without O_NONBLOCK, opening a pipe waits for its writer
    with open(handle, "rb") as stream:
        kind = os.fstat(handle)
        if not stat.S_ISREG(kind.st_mode):
            raise ConfigError(
                f"{path}: is not a plain file ({stat.filemode(kind.st_mode)}). Give a YAML file.",
                code="file.not-plain",
                path=str(path),
            )
        content = stream.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path}: is too large (more than {MAX_FILE_BYTES // 2**20} MiB). Give a YAML file of settings.",
            code="file.too-large",
            path=str(path),
        )
    return content


def _described(error: yaml.YAMLError) -> str:
    """Describe a YAML error and its position in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    problem = " ".join(str(getattr(error, "problem", "")).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
