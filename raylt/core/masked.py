"""`MaskedGathering`: the summable parts of replies, added up under masks (`federation.secure`).

It plays both sides of the protocol where the replies arrive: what a client would send is computed from its reply, and
what the server would learn is computed from that alone. Whoever can look into this process sees the replies; what is
real are the sums to the bit, what is lost with clients, and the cost in bytes and seconds.
"""

from collections.abc import Iterable, Mapping

from raylt import tree
from raylt.core.blocks import Summed
from raylt.core.client import Reply
from raylt.core.cohort import Traffic
from raylt.core.fixed_point import FixedPoint
from raylt.core.gathering import Gathering, Replies
from raylt.core.reductions import Reduction
from raylt.masking.protocol import KEY_BYTES, Collector, Member, introduce
from raylt.masking.shamir import SHARE_BYTES, threshold_of

SEALED_BYTES = 2 * SHARE_BYTES + 16     # two shares and their authentication tag


class MaskedGathering(Gathering):
    """The replies of one form to one call.

    Args:
        parts: to be summed; none where nothing is uploaded.
        members: the clients that were asked.
        weights: what a client's reply counts, by id.

    Attributes:
        overhead: bytes beyond the plain replies'; `up` is negative where whole numbers took more.
    """

    def __init__(self, parts: Mapping[str, Reduction], members: Iterable[int], weights: Mapping[int, float]):
        ids = list(members)
        super().__init__(parts, ids)
        self._places = {id: place for place, id in enumerate(ids)}
        self._layout = FixedPoint(parts, len(ids), max((weights[id] for id in ids), default=1.0) or 1.0)
        self._threshold = threshold_of(len(ids))
        self._members = [Member(place) for place in range(len(ids))] if parts else []
        self._collector = Collector(introduce(self._members, self._threshold), self._layout.length)
        everybody, others = len(self._members), len(self._members) * max(0, len(self._members) - 1)
        self.overhead = Traffic(down=2 * KEY_BYTES * everybody**2 + SEALED_BYTES * others,
                                up=2 * KEY_BYTES * everybody + SEALED_BYTES * others)

    def add(self, id: int, reply: Reply | Summed, private: object) -> None:
        """Takes in the next client's reply.

        Raises:
            Overflow: a value of it does not fit.
        """
        assert isinstance(reply, Reply)
        if self._members:
            place = self._places[id]
            masked = self._members[place].mask(self._layout.encode(reply.tree, reply.weight))
            self._collector.add(place, masked)
            self.overhead.up += masked.nbytes - tree.nbytes(reply.tree)
        self._weights[id], self.private[id] = reply.weight, private

    def replies(self) -> Replies:
        if not self._members:
            return Replies({}, self._weights)
        survivors = [self._places[id] for id in self._weights]
        answers = {place: self._members[place].unmask(survivors) for place in survivors}
        self.overhead.up += SHARE_BYTES * len(survivors) * len(self._members)
        total = self._collector.unmasked(answers, self._threshold)
        return Replies(self._layout.decode(total, sum(self._weights.values())), self._weights)
