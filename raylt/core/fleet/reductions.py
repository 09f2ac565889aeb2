"""The reductions that the server names for each part of the replies: `mean`, `total` or `each`.

    got = fleet.ask(self.train, cohort, message, model=mean.like(message["model"]), loss=mean.like(0.0), map=each)

`mean` is weighted by the replies' weights, `total` is a sum, `each` keeps the values by client. `mean` and `total` add
one reply after the other and keep none, so their memory does not grow with the number of clients. They can be
aggregated securely, robustly or with noise without any change to a method.

The `mean` of an integer or boolean tensor is its maximum, as BatchNorm's counters need: in a model, such tensors are
counters. Secure sums give the rounded mean, and robust rules the median. A method that needs a mean sends floats.

The server knows how many samples each client has, and checks a `total` against this number. By default, whole numbers
in a `total` count samples: they must not be negative, and their sum must not exceed the number of samples. The number
also bounds the magnitude of floats. `counting` names the counts that must add up to the number of samples, and
`over_samples` adds other conditions that follow from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from raylt.tree import Tree

ReductionKind = Literal["mean", "total", "each"]


@dataclass(frozen=True, eq=False)
class Reduction:
    """A reduction of one part of the replies, with the checks that the part must pass.

    Attributes:
        template: Names, types and shapes of the part, as a tree. Values do not matter, so tensors may be on torch's
            meta device; 0.0 stands for any number, a whole number n for a count of at least n. None: the part must have
            the same layout as in most of the replies.
        partial: Whether a reply may omit entries of the template's first level; they count as zero.
        shorter: Whether the part's tensors may have fewer rows than the template's.
        condition: Returns the reason why a part that fits the template still cannot be used, such as "has negative
            counts", or None.
        own_condition: Like `condition`, with the client's id as first argument.
        counted: Names of the whole numbers that count each label of the client's samples once; "" stands for the part
            itself.
        samples_condition: Function of the client's number of samples and all parts of the reply that returns the reason
            why the part cannot come from these samples, or None.
        largest: Maximum accepted magnitude of a value. None: 1e6 in a mean, as for parameters and gradients, 1e8 per
            sample of the client in a sum, and 1e18 in values by client.
        per_sample: For a sum over samples, the Euclidean length that one sample can add to it, or such lengths by the
            names of the leaves. If entries are by class, the length applies to the entry of the sample's class. None:
            the part is not such a sum.
        by_columns: Whether the part is a matrix in which each column is the sum of one class and ends with its count.
        mend: Converts such a sum with noise into a sum that samples could have.
    """

    kind: ReductionKind
    template: Any = None
    partial: bool = False
    shorter: bool = False
    condition: Callable[[Any], str | None] | None = None
    own_condition: Callable[[int, Any], str | None] | None = None
    counted: tuple[str, ...] = ()
    samples_condition: Callable[[int, Tree], str | None] | None = None
    largest: float | None = None
    per_sample: Mapping[str, float] | float | None = None
    by_columns: bool = False
    mend: Callable[[Any], Any] | None = None

    def like(self, template: Any) -> "Reduction":
        """Return a reduction for a part that has exactly the names, types and shapes of a template."""
        return replace(self, template=template, partial=False)

    def within(self, template: Any) -> "Reduction":
        """Return a reduction for a part that may omit some of the template's entries, such as classes.

        Entries that the part has must be complete.
        """
        return replace(self, template=template, partial=True)

    def or_shorter(self) -> "Reduction":
        """Return a reduction for a part whose tensors may have fewer rows than the template's."""
        return replace(self, shorter=True)

    def where(self, condition: Callable[[Any], str | None]) -> "Reduction":
        """Return a reduction that also checks a condition on the part.

        Args:
            condition: Function of the part that returns the reason why it cannot be used, or None.
        """
        return replace(self, condition=condition)

    def where_of(self, condition: Callable[[int, Any], str | None]) -> "Reduction":
        """Return a reduction that also checks a condition on the part and the client's id.

        Args:
            condition: Function of the client's id and the part that returns the reason why the part cannot be used, or
                None.
        """
        return replace(self, own_condition=condition)

    def counting(self, *names: str) -> "Reduction":
        """Return a reduction that checks that the part's counts add up to the client's number of samples.

        Args:
            names: Names of the counts, that is, the last names of their paths; without names, the part itself is a
                tensor of counts.
        """
        return replace(self, counted=names or ("",))

    def over_samples(self, condition: Callable[[int, Tree], str | None]) -> "Reduction":
        """Return a reduction that also checks a condition on the part and the client's number of samples.

        Args:
            condition: Function of the client's number of samples and all parts of its reply, which already have the
                right form. It returns the reason why the part cannot come from this number of samples, or None.
        """
        return replace(self, samples_condition=condition)

    def by_column(self) -> "Reduction":
        """Return a reduction for a matrix with one column per class: the class's sum, then its number of samples.

        Robust rules then treat each class separately.
        """
        return replace(self, by_columns=True)

    def up_to(self, largest: float) -> "Reduction":
        """Return a reduction that accepts magnitudes up to `largest`, in place of the default limit."""
        return replace(self, largest=largest)

    def bounded(self, per_sample: Mapping[str, float] | float, mend: Callable[[Any], Any] | None = None) -> "Reduction":
        """Return a reduction for a sum over samples, with an upper bound on what each sample can add.

        With this bound, noise can hide each sample (differential privacy).
        """
        return replace(self, per_sample=per_sample, mend=mend)


#: The mean of a part over clients, weighted by their samples; of an integer or boolean tensor, the maximum.
mean = Reduction("mean")
#: The sum of a part over clients; a missing entry counts as zero.
total = Reduction("total")
#: The value of a part for each client, by client id.
each = Reduction("each")
