"""Searches over the hyper-parameters of any method: `from tune import search, space`."""

from tune.search import Found, resume, search
from tune.space import space, spaces_of

__all__ = ["Found", "resume", "search", "space", "spaces_of"]
