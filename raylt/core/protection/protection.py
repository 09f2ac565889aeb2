"""`Protection`: decides, from the settings, what the server may see of clients' replies."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from raylt.config import Config
from raylt.core.client import Message
from raylt.core.fleet.aggregation import Aggregator, Plain, Robust
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.reductions import Reduction
from raylt.core.protection.accounting import rate_of
from raylt.core.protection.client_dp import RELEASED, ClientDP, ClientNoise
from raylt.core.protection.sample_dp import Noise, SampleDP, statement
from raylt.core.protection.survivors import fewest_survivors
from raylt.errors import BudgetSpent, ConfigError


def check_delta(config: Config, sizes: Sequence[int]) -> None:
    """Raise ConfigError if delta is at least 1 / n, where n is the number of protected samples or clients.

    A mechanism that publishes one of N samples or clients unchanged satisfies epsilon = 0 and delta = 1 / N, so such a
    delta protects nothing.

    Args:
        config: The run's configuration.
        sizes: Number of samples of each client that trains.

    Raises:
        ConfigError: The delta is too large.
    """
    privacy = config.privacy
    if privacy.epsilon is None and privacy.update_epsilon is None:
        return
    hidden = "samples" if privacy.epsilon is not None else "clients"
    count = sum(sizes) if hidden == "samples" else sum(size > 0 for size in sizes)
    if privacy.delta * count >= 1:
        raise ConfigError(
            f"privacy.delta: is at least 1 / {count}, so publishing one of the {count} {hidden} would satisfy it "
            f"({privacy.delta:g}). Give less than {1 / max(count, 1):.2g}.",
            code="config.out-of-range",
            key="privacy.delta",
            value=privacy.delta,
            count=count,
        )


class Protection:
    """The protection settings of a run, and the privacy budget that is left.

    Args:
        config: The run's configuration.
        samples: Number of samples by client id.
    """

    def __init__(self, config: Config, samples: Mapping[int, int]):
        self._config = config
        self._samples = samples
        self._judging = False
        self._finishing = False
        self._rehearsed = False
        self._spent = False
        self._released = 0  # last round whose models were uploaded with noise

    def with_templates(self, parts: Mapping[str, Reduction], message: Message) -> dict[str, Reduction]:
        """Return the reductions of a call, with the message's model as the template for noisy model uploads."""
        model = parts.get(RELEASED)
        if self._config.privacy.update_epsilon is None or self._judging or model is None or RELEASED not in message:
            return dict(parts)
        return {**parts, RELEASED: model.like(message[RELEASED])}

    def aggregator(
        self, round: int, message: Message, parts: Mapping[str, Reduction], cohort: Cohort, weights: Mapping[int, float]
    ) -> Aggregator:
        """Return an empty aggregator for the replies of a cohort.

        Args:
            round: Number of the round.
            message: The message to the cohort.
            parts: The reductions by name.
            cohort: The clients that are asked.
            weights: The weight of each client's reply, by id.

        Raises:
            BudgetSpent: The parts have already been uploaded with noise.
            ConfigError: The settings do not allow to upload these parts.
        """
        secure = self._config.federation.secure and not self._judging
        if not self._judging:
            self._check_covered(parts)
            client_noise = ClientNoise.of(parts, message, self._config, round)
            if client_noise is not None:
                self._release(round, cohort)
                inner = self._without_noise(parts, cohort, dict.fromkeys(cohort, 1.0), secure)
                return ClientDP(inner, client_noise)
        noise = Noise.of(parts, self._config)
        if noise is None:
            return self._without_noise(parts, cohort, weights, secure)
        self._spend(round, noise)
        share = 1 / fewest_survivors(len(cohort)) if secure else 1.0
        noisy_parts = noise.noisy_parts(parts)
        # robust rules compare means, which noisy counts do not give
        inner = self._without_noise(noisy_parts, cohort, weights, True) if secure else Plain(noisy_parts, cohort)
        return SampleDP(inner, noise, parts, share, statement(self._config, noise))

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Allow noisy uploads inside the block, which is the method's last phase, and no others.

        Raises:
            ConfigError: `privacy.epsilon` is set, and the block uploaded nothing with noise.
        """
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False
        budget = self._config.privacy.epsilon
        if budget is not None and not self._spent:
            raise ConfigError(
                f"privacy.epsilon: the last phase uploaded no sum that gets noise ({budget:g}). Request "
                "total.like(...).bounded(...) in `finish`, or set privacy.epsilon=null.",
                code="privacy.not-covered",
                key="privacy.epsilon",
                value=budget,
            )

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Reject noisy uploads inside the block, since a rehearsal would reveal a second sample of the noise."""
        before = self._rehearsed
        self._rehearsed = True
        try:
            yield
        finally:
            self._rehearsed = before

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Turn off masks and clients' noise inside the block, for replies that only the researcher sees."""
        before = self._judging
        self._judging = True
        try:
            yield
        finally:
            self._judging = before

    def _without_noise(
        self, parts: Mapping[str, Reduction], cohort: Cohort, weights: Mapping[int, float], secure: bool
    ) -> Aggregator:
        if secure:
            from raylt.core.protection.secure_sum import Secure  # imported lazily, since few runs need its library

            return Secure(parts, cohort, weights)
        rule = self._config.federation.robust
        return Plain(parts, cohort) if rule is None else Robust(parts, cohort, rule, self._samples)

    def _check_covered(self, parts: Mapping[str, Reduction]) -> None:
        """Raise ConfigError if `privacy.epsilon` is set and a part would show the server samples without noise.

        After the last round every part must be a bounded sum. Before, clients send models and other means, which the
        summary names as not covered; sums over samples there would reveal what the noise hides later.
        """
        budget = self._config.privacy.epsilon
        if budget is None:
            return
        for name, part in parts.items():
            if self._finishing and (part.kind != "total" or part.per_sample is None):
                problem = f"the part {name} of the last phase is not such a sum"
            elif not self._finishing and part.kind != "mean":
                problem = f"the part {name} would be uploaded before"
            else:
                continue
            raise ConfigError(
                f"privacy.epsilon: noise hides samples only in bounded sums after the last round, and {problem} "
                f"({budget:g}). Ask for it in `finish` with total.like(...).bounded(...), or leave it out.",
                code="privacy.not-covered",
                key="privacy.epsilon",
                value=budget,
                part=name,
            )

    def _release(self, round: int, cohort: Cohort) -> None:
        """Record the upload of models with noise, if the accountant's assumptions hold for it.

        The accountant counts one upload in each round. With federation.sampling=poisson it relies on the chance of each
        client to be asked. Without, an additional client must not displace another one.

        Raises:
            BudgetSpent: The round has already uploaded models.
            ConfigError: The upload is outside of a round, or the method chose the clients itself.
        """
        budget = self._config.privacy.update_epsilon
        assert budget is not None
        if round == 0 or self._finishing:
            self._refuse_release("models are uploaded outside of a round", "Ask for them in `round`")
        if round <= self._released:
            raise BudgetSpent(
                f"round {round}: models would be uploaded with noise a second time, and privacy.update_epsilon = "
                f"{budget:g} counts one upload in each round. Request the models once in `round`.",
                code="privacy.budget-spent",
                key="privacy.update_epsilon",
                round=round,
                value=budget,
            )
        if not cohort.drawn and not (cohort.everyone and rate_of(self._config) == 1):
            self._refuse_release(
                "the method chose the clients of this round itself", "Ask those that `Method.sample` draws"
            )
        self._released = round

    def _refuse_release(self, problem: str, remedy: str) -> NoReturn:
        budget = self._config.privacy.update_epsilon
        raise ConfigError(
            f"privacy.update_epsilon: the accountant counts one upload of models in each round, from clients drawn by "
            f"federation.sampling, and {problem} ({budget:g}). {remedy}.",
            code="privacy.not-covered",
            key="privacy.update_epsilon",
            value=budget,
        )

    def _spend(self, round: int, noise: Noise) -> None:
        if self._rehearsed:
            raise ConfigError(
                "privacy.epsilon: an evaluation before the run's end would spend the budget of the run's last phase "
                f"({self._config.privacy.epsilon:g}). Set privacy.epsilon=null for searches that need such "
                "evaluations.",
                code="privacy.rehearsal",
                key="privacy.epsilon",
            )
        if self._spent:
            raise BudgetSpent(
                f"round {round}: {', '.join(noise.deviations)} would be uploaded a second time, and "
                f"privacy.epsilon = {self._config.privacy.epsilon:g} allows one upload. Upload each sum once.",
                code="privacy.budget-spent",
                key="privacy.epsilon",
                round=round,
                parts=list(noise.deviations),
            )
        self._spent = True
