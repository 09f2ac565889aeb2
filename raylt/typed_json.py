"""JSON that is checked against a type, and hashes over JSON."""

import hashlib
import json
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from raylt.errors import CheckpointError, RayltError

T = TypeVar("T")
closed = with_config(ConfigDict(extra="forbid"))  # for a TypedDict: refuses unknown keys


def as_json(content: bytes | str, kind: "TypeAdapter[T]", what: str, error: type[RayltError] = CheckpointError) -> T:
    """Parse a JSON text and check it strictly against a type: a string, for example, is not a number.

    Args:
        content: The JSON.
        kind: Adapter of the type.
        what: Name of the content in errors.
        error: Class of the error for content that is not JSON or has another type.
    """
    try:
        return kind.validate_python(json.loads(content), strict=True)
    except ValidationError as invalid:
        first = invalid.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"{what}: {f'{where}: ' if where else ''}{first['msg'][:1].lower()}{first['msg'][1:]}"
        raise error(message, code="file.malformed", key=where) from None
    except (ValueError, RecursionError) as invalid:
        raise error(f"{what}: is not JSON ({' '.join(str(invalid).split())})", code="file.malformed", key="") from None


def printable(text: str) -> str:
    """Return a string if all its characters are printable; otherwise raise ValueError.

    Raises:
        ValueError: it has a character that cannot be printed, such as a newline or an escape sequence.
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
        previous: the hash of the line before; of the first line, that of the file it belongs to.
    """
    tree = json.loads(json.dumps({**content, "previous": previous}))
    return {**tree, "sha256": hash_json(tree)}


def is_chained(line: dict[str, Any], previous: str) -> bool:
    """Return whether a line that `chain` made is intact and follows the line with the hash `previous`."""
    content = {key: value for key, value in line.items() if key != "sha256"}
    return line.get("previous") == previous and line.get("sha256") == hash_json(content)
