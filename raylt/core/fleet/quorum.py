"""`Quorum`: decides whether enough clients sent a valid reply, and whether training has diverged if not."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from raylt import tree
from raylt.config import Config
from raylt.core.client import Message
from raylt.core.fleet.cohort import Cohort
from raylt.errors import ClientError, Diverged, TooFewReplies
from raylt.tree import Tree

# if most clients report one of these codes, training has diverged
DIVERGED = frozenset({"reply.not-finite", "reply.out-of-range", "reply.overflow", "model.not-finite"})
ROBUST_REMEDY = " If one of the clients may be hostile, set federation.robust."
# oversized features or updates can also indicate divergence
MAY_DIVERGE = DIVERGED | {"reply.wrong-sums", "reply.outlier"}


class Call(NamedTuple):
    """A call of a client function on a cohort; `message` is the message to its clients."""

    round: int
    function: str
    cohort: Cohort
    message: Message


class Quorum:
    """The check that at least `federation.quorum` of the clients of each call sent a valid reply.

    Attributes:
        robust_remedy: The sentence ROBUST_REMEDY if the run can set `federation.robust`, otherwise empty.
    """

    def __init__(self) -> None:
        self.robust_remedy = ""
        self._diverging = -2, -2  # first and last of the latest rounds in a row with such errors

    def check(self, config: Config, call: Call, usable: int, errors: Sequence[ClientError]) -> None:
        """Check that enough clients of a cohort sent a valid reply.

        Args:
            config: The settings of the run.
            call: The call that the clients answered.
            usable: Number of valid replies.
            errors: Errors of the other clients.

        Raises:
            Diverged: Too few replies are valid, and most clients sent values that no model can have.
            TooFewReplies: Too few replies are valid, for another reason.
        """
        if any(error.code in DIVERGED for error in errors):
            first, last = self._diverging
            self._diverging = (first if call.round - last <= 1 else call.round, call.round)
        quorum, asked = config.federation.quorum, call.cohort.needed
        needed = max(1, math.ceil(quorum * asked - 1e-9))
        if usable >= needed:
            return
        self._check_divergence(config, call, errors)
        first = errors[0]
        remedy = ""
        if first.code in MAY_DIVERGE:
            remedy = f" If training diverged, lower local.lr ({config.local.lr:g}).{self.robust_remedy}"
        raise TooFewReplies(
            f"round {call.round}, {call.function}: {usable} of {asked} clients sent usable replies, and "
            f"federation.quorum = {quorum:g} needs {needed}. The first failure: {str(first).rstrip('.')}.{remedy}",
            code="reply.too-few",
            round=call.round,
            function=call.function,
            usable=usable,
            asked=asked,
            needed=needed,
            client=first.client,
            cause=first.code,
        ) from first

    def _check_divergence(self, config: Config, call: Call, errors: Sequence[ClientError]) -> None:
        """Raise `Diverged` if more than half of the clients sent infinite, NaN or far too large values."""
        diverged = [error for error in errors if error.code in DIVERGED]
        if 2 * len(diverged) <= len(call.cohort):
            return
        began, _ = self._diverging
        before = largest_of(call.message)
        rate = config.local.lr
        raise Diverged(
            f"local.lr: training diverged in round {began} ({rate:g}). In round {call.round}, {call.function}, "
            f"{len(diverged)} of {len(call.cohort)} clients sent values that are infinite, not numbers or too large. "
            f"First: {diverged[0]}. The largest value that they received is {before:.3g}. Lower local.lr, or weights "
            f"and rates of the method.{self.robust_remedy}",
            code="training.diverged",
            key="local.lr",
            value=rate,
            round=began,
            function=call.function,
            client=diverged[0].client,
            size=diverged[0].details.get("value"),
            sent=before,
            cause=diverged[0].code,
        ) from diverged[0]


def largest_of(message: Tree) -> float:
    """Return the largest magnitude in the float tensors of a tree, or 0 if the tree has none."""
    floats = [leaf for _, leaf in tree.leaves(message) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return max((leaf.abs().max().item() for leaf in floats if leaf.numel()), default=0.0)
