"""Assertions on the codes and details of errors instead of their messages."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from raylt.errors import RayltError


@contextmanager
def refused(code: str, kind: type[RayltError] = RayltError, **details: object) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error with this code and these details.

    Yields:
        What `pytest.raises` yields; the error is in `.value` after the block.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"{error.code or 'no code'}: {error}"
    differing = {name: error.details.get(name) for name, value in details.items() if error.details.get(name) != value}
    assert not differing, f"details differ: {differing}; expected {details}"
