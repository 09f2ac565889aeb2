"""`Schema`: what the replies to one call must look like before they count."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raylt import tree
from raylt.core.client import Reply
from raylt.core.reductions import Reduction
from raylt.tree import Tree

Form = tuple[tuple[str, str], ...]      # path and kind of each leaf, by path


class Schema:
    """It follows from the line that asks: one reduction for each part, with or without a template."""

    def __init__(self, parts: Mapping[str, Reduction]):
        self._parts = parts
        self._templates = {name: _kinds({name: part.template}) for name, part in parts.items()
                           if part.template is not None}

    def fault(self, reply: Reply) -> str | None:
        """Why a reply cannot be used, whatever the others look like; or None."""
        if not (math.isfinite(reply.weight) and reply.weight > 0):
            return f"weight {reply.weight}"
        if missing := self._parts.keys() - reply.tree.keys():
            return f"{min(missing)} is missing"
        if more := reply.tree.keys() - self._parts.keys():
            return f"{min(more)} was not asked for"
        for path, leaf in tree.leaves(reply.tree):
            fault = _value_fault(leaf, self._parts[path.partition(".")[0]])
            if fault:
                return f"{path} {fault}"
        return next((fault for name in self._templates if (fault := self._misfit(name, reply.tree[name]))), None)

    def form(self, reply: Reply) -> Form:
        """What the parts without a template look like; the form that most replies have is the one that counts."""
        loose = {name: value for name, value in reply.tree.items() if name not in self._templates}
        return tuple(sorted(_kinds(loose).items()))

    def _misfit(self, name: str, value: Any) -> str | None:
        expected, actual = self._templates[name], _kinds({name: value})
        for path, kind in expected.items():
            if path in actual and actual[path] != kind:
                return f"{path} is {actual[path]}, expected {kind}"
            if path not in actual and not self._parts[name].partial:
                return f"{path} is missing"
        return f"{min(more)} is additional" if (more := actual.keys() - expected.keys()) else None


def difference(form: Form, usual: Form) -> str:
    """What makes one form another than the usual one, in a few words."""
    own, others = dict(form), dict(usual)
    for path in sorted(own.keys() | others.keys()):
        if own.get(path) != others.get(path):
            if path not in own:
                return f"{path} is missing, most replies have it"
            if path not in others:
                return f"{path} is additional, most replies do not have it"
            return f"{path} is {own[path]}, most replies have {others[path]}"
    raise AssertionError("the forms are equal")


def _value_fault(leaf: Any, part: Reduction) -> str | None:
    if isinstance(leaf, Tensor):
        return "is not finite" if leaf.is_floating_point() and not torch.isfinite(leaf).all() else None
    if isinstance(leaf, int | float):
        return None if math.isfinite(leaf) else f"is {leaf}"
    if part.kind != "each":
        return f"is a {type(leaf).__name__}, of which there is no {part.kind}"
    return None if leaf is None or isinstance(leaf, str) else f"is a {type(leaf).__name__}"


def _kinds(parts: Tree) -> dict[str, str]:
    return {path: f"{leaf.dtype} {list(leaf.shape)}".removeprefix("torch.") if isinstance(leaf, Tensor)
            else "number" if isinstance(leaf, int | float) else type(leaf).__name__
            for path, leaf in tree.leaves(parts)}
