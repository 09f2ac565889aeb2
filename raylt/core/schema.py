"""`Form`: what the replies of one call must look like before they count."""

import math

import torch
from torch import Tensor

from raylt import tree
from raylt.core.client import Reply
from raylt.tree import Tree


class Form:
    """Names, types and shapes, by path.

    Args:
        like: what is known of the replies before the first.
        partial: whether a reply may leave names out and bring new ones (sums); else the first reply settles them.
    """

    def __init__(self, like: Tree, partial: bool):
        self.kinds, self.partial, self.closed = _kinds(like), partial, False

    def extend(self, reply: Reply) -> None:
        """What the replies after this one are held against."""
        self.kinds = self.kinds | _kinds(reply.tree)
        self.closed = not self.partial

    def fault(self, reply: Reply) -> str | None:
        """Why a reply cannot be used, or None."""
        if not (math.isfinite(reply.weight) and reply.weight > 0):
            return f"weight {reply.weight}"
        for path, leaf in tree.leaves(reply.tree):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not torch.isfinite(leaf).all():
                return f"{path} is not finite"
            if isinstance(leaf, float) and not math.isfinite(leaf):
                return f"{path} is {leaf}"
        found = _kinds(reply.tree)
        for path, kind in self.kinds.items():
            if path not in found:
                if not self.partial:
                    return f"{path} is missing"
            elif found[path] != kind:
                return f"{path} is {found[path]}, expected {kind}"
        if self.closed and (more := found.keys() - self.kinds.keys()):
            return f"{min(more)} is additional"
        return None


def _kinds(parts: Tree) -> dict[str, str]:
    return {path: f"{leaf.dtype} {list(leaf.shape)}".removeprefix("torch.") if isinstance(leaf, Tensor)
            else "number" if isinstance(leaf, int | float) else type(leaf).__name__
            for path, leaf in tree.leaves(parts)}
