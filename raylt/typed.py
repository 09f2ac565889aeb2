"""JSON that is of a kind, or an error of one line; and what it hashes to."""

import hashlib
import json
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from raylt.errors import CheckpointError, RayltError

T = TypeVar("T")
closed = with_config(ConfigDict(extra="forbid"))        # a TypedDict with no other keys than its own


def as_json(content: bytes | str, kind: "TypeAdapter[T]", what: str, error: type[RayltError] = CheckpointError) -> T:
    """A value of a kind from its JSON, without any conversion: a text is no number.

    Args:
        what: what errors call it.
        error: raised where it is no JSON, or of another kind.
    """
    try:
        return kind.validate_python(json.loads(content), strict=True)
    except ValidationError as invalid:
        first = invalid.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise error(f"{what}: {f'{where}: ' if where else ''}{first['msg'][:1].lower()}{first['msg'][1:]}") from None
    except (ValueError, RecursionError) as invalid:
        raise error(f"{what}: is not JSON ({' '.join(str(invalid).split())})") from None


def hash_json(tree: Any) -> str:
    """SHA-256 of something that JSON can say, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
