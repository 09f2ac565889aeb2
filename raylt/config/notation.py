"""YAML as it is read here: a scalar is what it looks like (YAML 1.2's numbers and true, false, null), each key stands
there once, and nothing refers to anything else.

YAML 1.1, which PyYAML reads otherwise, takes `on` and `yes` for true, 010 for 8, 1:30 for 90 and 1_000 for 1000, and
the last of two equal keys; here these are texts, which a field of numbers refuses, and an error.
"""

import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from raylt.errors import ConfigError

LONGEST = 2**20             # bytes of a file
DEEPEST = 30                # levels
NULL, BOOL, INT, FLOAT, TEXT, LIST, MAP = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map"))
_LOOKS = {
    NULL: re.compile(r"(~|null|Null|NULL|)$"),
    BOOL: re.compile(r"(true|True|TRUE|false|False|FALSE)$"),
    INT: re.compile(r"[-+]?(0|[1-9][0-9]*)$"),
    FLOAT: re.compile(r"([-+]?((0|[1-9][0-9]*)?\.[0-9]+|(0|[1-9][0-9]*)\.?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)"
                      r"|\.(nan|NaN|NAN))$"),
}


def _fault(what: str, place: yaml.Mark) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, what, place)


class _Reader(yaml.SafeLoader):
    yaml_implicit_resolvers = {None: list(_LOOKS.items())}        # noqa: RUF012 - PyYAML's own name, of a class

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise _fault("it refers to another place (*name); write the value out", self.peek_event().start_mark)
        self.depth = getattr(self, "depth", 0) + 1
        if self.depth > DEEPEST:
            raise _fault(f"more than {DEEPEST} levels", self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def scalar(self, node: yaml.ScalarNode) -> Any:
        """The value of a scalar, whose tag may have been written out."""
        text, looks = node.value, _LOOKS.get(node.tag)
        if looks is not None and not looks.match(text):
            raise _fault(f"{text[:40]!r} is not what its tag says", node.start_mark)
        if node.tag == INT and len(text) > 300:
            raise _fault("a number of more than 300 digits", node.start_mark)
        if node.tag == FLOAT:
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        return {NULL: lambda: None, BOOL: lambda: text.lower() == "true", INT: lambda: int(text)}[node.tag]()

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        """A mapping whose keys are texts, each once."""
        tree: dict[str, Any] = {}
        for key, value in node.value:
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str):
                raise _fault(f"the key {str(name)[:40]} is not a name; quote it", key.start_mark)
            if name in tree:
                raise _fault(f"{name} stands there twice", key.start_mark)
            tree[name] = self.construct_object(value, deep=True)
        return tree


_Reader.yaml_constructors = {
    **dict.fromkeys((NULL, BOOL, INT, FLOAT), _Reader.scalar), TEXT: yaml.SafeLoader.construct_scalar,
    LIST: lambda reader, node: [reader.construct_object(item, deep=True) for item in node.value], MAP: _Reader.mapping,
    None: yaml.SafeLoader.construct_undefined}


class _Writer(yaml.SafeDumper):
    """Quotes the texts that would be read as something else, by this reader and by others."""

    yaml_implicit_resolvers = {
        first: [*looks, *_LOOKS.items()] for first, looks in yaml.SafeDumper.yaml_implicit_resolvers.items()} | {
        None: list(_LOOKS.items())}


def parse(text: str) -> Any:
    """The value that a text in YAML stands for.

    Raises:
        ValueError: one line that says what is wrong with it, and where.
    """
    try:
        return yaml.load(text, _Reader)
    except yaml.YAMLError as error:
        raise ValueError(_said(error)) from None
    except RecursionError:
        raise ValueError(f"more than {DEEPEST} levels") from None


def write(tree: Any) -> str:
    """YAML that `parse` reads as the same, keys in their order."""
    return yaml.dump(tree, Dumper=_Writer, sort_keys=False)


def read_file(path: Path) -> Any:
    """The value that a YAML file holds.

    Raises:
        ConfigError: it is not there, not a plain file of at most 1 MiB, or not YAML.
    """
    try:
        content = _content(path)
        return parse(content.decode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give a YAML file that exists") from None
    except ValueError as error:             # UnicodeDecodeError too
        raise ConfigError(f"{path}: not YAML ({error})") from None


def _content(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)         # a pipe without a writer would be waited for
    with open(handle, "rb") as stream:
        kind = os.fstat(handle)
        if not stat.S_ISREG(kind.st_mode):
            raise OSError(0, "is not a plain file")
        content = stream.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise OSError(0, f"is longer than {LONGEST // 2**20} MiB")
    return content


def _said(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    problem = " ".join(str(getattr(error, "problem", "")).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
