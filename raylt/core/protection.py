"""`Protection`: what the server may see of the replies to a call, as `federation` and `privacy` say."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from raylt.config import Config
from raylt.core.client import Message, Reply
from raylt.core.client_noise import ClientNoise
from raylt.core.cohort import Cohort
from raylt.core.gathering import Gathering, Replies
from raylt.core.noise import Noise, statement
from raylt.core.reductions import Reduction
from raylt.errors import BudgetSpent, ConfigError
from raylt.masking.shamir import threshold_of
from raylt.tree import Tree


@dataclass(frozen=True)
class Handling:
    """What is done with the replies to one call.

    Attributes:
        gathering: makes an empty place for replies of one form.
        sent: what a client sends of its reply.
        received: what the server makes of what came together.
        statement: what a summary says of noise; None without.
        summable: whether the server needs to see nothing of a reply but its part of the sums of its block.
    """

    gathering: Callable[[], Gathering]
    sent: Callable[[Reply], Reply] = lambda reply: reply
    received: Callable[[Replies], Replies] = lambda replies: replies
    statement: Tree | None = None
    summable: bool = False


class Protection:
    """The settings, and how much of the privacy budget is left."""

    def __init__(self, config: Config):
        self._config = config
        self._judging = self._rehearsed = self._spent = False

    def handling(self, round: int, message: Message, parts: Mapping[str, Reduction], cohort: Cohort,
                 weights: Mapping[int, float]) -> Handling:
        """How the replies of a cohort are handled.

        Args:
            message: what it is sent.
            weights: what each client's reply counts, by id.

        Raises:
            BudgetSpent: the parts have been uploaded with noise before.
            ConfigError: they may not be uploaded in this way.
        """
        secure = self._config.federation.secure and not self._judging
        if not self._judging and (hidden := ClientNoise.of(parts, message, self._config, round)) is not None:
            gathering = self._gathering(parts, cohort, dict.fromkeys(cohort, 1.0), secure)
            return Handling(gathering, hidden.clipped, hidden.noised, hidden.statement)
        noise = Noise.of(parts, self._config)
        if noise is None:
            plain = not secure and self._config.federation.robust is None
            return Handling(self._gathering(parts, cohort, weights, secure),
                            summable=plain and not any(part.kind == "each" for part in parts.values()))
        self._spend(round, noise)
        share = 1 / threshold_of(len(cohort)) if secure else 1.0
        return Handling(
            self._gathering(noise.released(parts), cohort, weights, secure),
            lambda reply: noise.added(reply, parts, share),
            lambda got: Replies({name: noise.mended(name, value, parts) for name, value in got.items()}, got.weights),
            statement(self._config, noise))

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside the block nothing is uploaded with noise: what is drawn there would be seen as well."""
        before, self._rehearsed = self._rehearsed, True
        try:
            yield
        finally:
            self._rehearsed = before

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Inside the block what is asked for is for our own eyes."""
        before, self._judging = self._judging, True
        try:
            yield
        finally:
            self._judging = before

    def _gathering(self, parts: Mapping[str, Reduction], cohort: Cohort, weights: Mapping[int, float],
                   secure: bool) -> Callable[[], Gathering]:
        if not secure:
            return lambda: Gathering(parts, cohort, self._config.federation.robust)
        from raylt.core.masked import MaskedGathering  # here: it needs a library that few runs do
        return lambda: MaskedGathering(parts, cohort, weights)

    def _spend(self, round: int, noise: Noise) -> None:
        if self._rehearsed:
            raise ConfigError("privacy.epsilon: a rehearsed finish would spend the budget of the run's own; set "
                              "privacy.epsilon=null where runs are judged before their end")
        if self._spent:
            raise BudgetSpent(f"round {round}: {', '.join(noise.deviations)} would be uploaded a second time, and "
                              f"privacy.epsilon = {self._config.privacy.epsilon:g} is for once")
        self._spent = True
