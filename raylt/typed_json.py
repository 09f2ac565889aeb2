"""Functions that check JSON against a type, and hash JSON."""

import hashlib
import json
from collections import Counter
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from raylt.errors import CheckpointError, RayltError

T = TypeVar("T")
closed = with_config(ConfigDict(extra="forbid"))  # Decorator for a TypedDict; rejects unknown keys.


def as_json(content: bytes | str, kind: "TypeAdapter[T]", what: str, error: type[RayltError] = CheckpointError) -> T:
    """Parse a JSON text and check it against a type, without conversions such as from a string to a number.

    Args:
        content: The JSON text.
        kind: Adapter of the type.
        what: Name of the content in errors.
        error: Class of the error for content that is not JSON or does not have the type.
    """
    return check_json(parse_json(content, what, error), kind, what, error)


class DoubledKey(ValueError):
    """A JSON object has a key twice."""

    def __init__(self, key: str):
        super().__init__(f"it has a key twice ({key[:80]!a})")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict.

    JSON parsers differ in the value that they keep for a duplicate key; Python's keeps the last one.

    Raises:
        DoubledKey: Two keys are equal.
    """
    tree = dict(pairs)
    if len(tree) < len(pairs):
        raise DoubledKey(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return tree


def parse_json(content: bytes | str, what: str, error: type[RayltError] = CheckpointError) -> Any:
    """Return the value of a JSON text.

    Args:
        content: The JSON.
        what: Name of the content in errors.
        error: Class of the error for a text that is not JSON, or has duplicate keys in an object.

    Raises:
        error: The text is not JSON, or has duplicate keys in an object.
    """
    try:
        return json.loads(content, object_pairs_hook=unique_keys)
    except DoubledKey as doubled:
        raise error(f"{what}: {doubled}. Use an intact copy.", code="file.malformed", key=doubled.key) from None
    except (ValueError, RecursionError) as invalid:
        reason = " ".join(str(invalid).split())
        raise error(f"{what}: is not JSON ({reason}). Use an intact copy.", code="file.malformed", key="") from None


def check_json(tree: Any, kind: "TypeAdapter[T]", what: str, error: type[RayltError] = CheckpointError) -> T:
    """Check the value of a JSON text strictly against a type; arguments are as for `as_json`."""
    try:
        return kind.validate_python(tree, strict=True)
    except ValidationError as invalid:
        first = invalid.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = f"{first['msg'][:1].lower()}{first['msg'][1:]}".rstrip(".")
        message = f"{what}: {f'{where}: ' if where else ''}{reason}. Use an intact copy."
        raise error(message, code="file.malformed", key=where) from None


def printable(text: str) -> str:
    """Return a string if all its characters are printable; otherwise raise ValueError.

    Raises:
        ValueError: The string has a character that cannot be printed, such as a newline or an escape sequence.
    """
    if not text.isprintable():
        raise ValueError(f"has a character that cannot be printed ({text[:80]!a})")
    return text


def hash_json(tree: Any) -> str:
    """Return the SHA-256 of a JSON value; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def chain(content: dict[str, Any], previous: str) -> dict[str, Any]:
    """Return a log line with the previous line's hash and with a hash over its own content.

    Args:
        content: The content of the line.
        previous: Hash of the previous line; for the first line, hash of the file to which the log belongs.
    """
    tree = json.loads(json.dumps({**content, "previous": previous}))
    return {**tree, "sha256": hash_json(tree)}


def is_chained(line: dict[str, Any], previous: str) -> bool:
    """Return whether a line that `chain` made is intact and follows the line with the hash `previous`."""
    content = {key: value for key, value in line.items() if key != "sha256"}
    return line.get("previous") == previous and line.get("sha256") == hash_json(content)
