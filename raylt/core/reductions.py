"""What the server wants to see of each part of the replies: `mean`, `total` or `each`.

    got = fleet.ask(self.train, cohort, message, model=mean.like(message["model"]), loss=mean.like(0.0), map=each)

`mean` is weighted by the replies' weights, `total` is a sum, `each` keeps the values by client. The first two add one
reply after the other and forget it, so their memory does not grow with the clients, and they can be aggregated
securely, robustly or with noise without touching a method.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["mean", "total", "each"]


@dataclass(frozen=True, eq=False)
class Reduction:
    """How one part is reduced, and what it must look like.

    Attributes:
        template: names, types and shapes of the part, as a tree (values do not matter, so tensors may lie on torch's
            meta device; 0.0 stands for any number, a whole number for a count of at least so many); None: what most
            of the replies look like.
        partial: whether a reply may leave entries of the template's first level out; they count as zero.
        condition: of a part that looks right, why it cannot be used all the same ("has negative counts"), or None.
        own_condition: the same, told first whose reply it is.
        largest: magnitude up to which float tensors are believed; None: 1e6 in a mean, as of parameters and gradients,
            and 1e18 in sums over samples and in values by client.
        per_sample: of a sum over samples, the Euclidean length of what one sample can add to it, or by their names to
            its leaves; with entries by class to those of its class alone. None: it is no such sum.
        mend: what makes of such a sum with noise one that samples could have.
    """

    kind: Kind
    template: Any = None
    partial: bool = False
    condition: Callable[[Any], str | None] | None = None
    own_condition: Callable[[int, Any], str | None] | None = None
    largest: float | None = None
    per_sample: Mapping[str, float] | float | None = None
    mend: Callable[[Any], Any] | None = None

    def like(self, template: Any) -> "Reduction":
        """Of a part that has these names, types and shapes, all of them."""
        return replace(self, template=template, partial=False)

    def within(self, template: Any) -> "Reduction":
        """Of a part that has some of these entries (of classes, say), each with all its names, types and shapes."""
        return replace(self, template=template, partial=True)

    def where(self, condition: Callable[[Any], str | None]) -> "Reduction":
        """Of a part that also meets a condition; it gets the part and returns why that cannot be used, or None."""
        return replace(self, condition=condition)

    def where_of(self, condition: Callable[[int, Any], str | None]) -> "Reduction":
        """Of a part that meets a condition of its client's; it gets the client's id and the part."""
        return replace(self, own_condition=condition)

    def up_to(self, largest: float) -> "Reduction":
        """Of a part whose float tensors may hold values of this magnitude."""
        return replace(self, largest=largest)

    def bounded(self, per_sample: Mapping[str, float] | float, mend: Callable[[Any], Any] | None = None) -> "Reduction":
        """Of a sum over samples to which one adds no more than this, so that noise can hide it."""
        return replace(self, per_sample=per_sample, mend=mend)


mean = Reduction("mean")
total = Reduction("total")
each = Reduction("each")
