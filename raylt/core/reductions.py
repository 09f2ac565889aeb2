"""What the server wants to see of each part of the replies: `mean`, `total` or `each`.

    got = fleet.ask(self.train, cohort, message, model=mean.like(message["model"]), loss=mean, map=each)

`mean` is weighted by the replies' weights, `total` is a sum, `each` keeps the values by client. The first two add one
reply after the other and forget it, so their memory does not grow with the clients, and they can be aggregated
securely, robustly or with noise without touching a method.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["mean", "total", "each"]


@dataclass(frozen=True, eq=False)
class Reduction:
    """How one part is reduced, and what it must look like.

    Attributes:
        template: names, types and shapes of the part, as a tree (values do not matter, so tensors may lie on torch's
            meta device); None: what most of the replies look like.
        partial: whether a reply may leave names of the template out; they count as zero.
    """

    kind: Kind
    template: Any = None
    partial: bool = False

    def like(self, template: Any) -> "Reduction":
        """Of a part that has these names, types and shapes, all of them."""
        return replace(self, template=template, partial=False)

    def within(self, template: Any) -> "Reduction":
        """Of a part that has some of these names, with these types and shapes."""
        return replace(self, template=template, partial=True)


mean = Reduction("mean")
total = Reduction("total")
each = Reduction("each")
