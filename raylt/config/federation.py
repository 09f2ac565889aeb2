"""The section on who takes part in a round, and how what they send is put together."""

from typing import Literal

from pydantic import model_validator

from raylt.config.section import MOST, Section, setting


class FederationConfig(Section):
    """Who takes part in a round and what happens when some do not answer."""

    rounds: int = setting(30, "How many rounds are run (R).", ge=1, le=MOST)
    participation: float = setting(1.0, "The share of the clients that take part in a round.", gt=0, le=1)
    sampling: Literal["fixed", "poisson"] = setting(
        "fixed", "How the clients of a round are drawn: always so many; or each by itself with the chance "
        "federation.participation, so that some rounds have more of them than others.")
    over_select: float = setting(0.0, "The share of clients asked beyond that; the round ends with the first replies "
                                 "that are enough, so it cannot be repeated exactly.", ge=0, le=10)
    quorum: float = setting(0.8, "The share of the clients asked whose replies must be usable, or the run ends.", gt=0,
                            le=1)
    deadline_s: float | None = setting(None, "The seconds after which a round goes on without the clients that are "
                                       "late; null waits for all.", gt=0, le=MOST)
    retries: int = setting(2, "How many times a client that was lost or failed is asked again for the same reply.",
                           ge=0, le=1000)
    batchnorm: Literal["average", "local"] = setting(
        "average", "What happens to BatchNorm's running statistics: they are averaged like parameters, or each client "
        "keeps its own.")
    robust: Literal["median", "trimmed_mean", "norm_clipped_mean"] | None = setting(
        None, "How the means of a round are taken where some clients may be hostile: entry by entry the median, or "
        "the mean without the largest and smallest fifth; or the mean of what is cut to the median distance from the "
        "median. Null is the plain mean. The server then holds every reply of a round at once.")
    secure: bool = setting(False, "Whether the server gets sums of masked uploads alone, as secure aggregation has it; "
                           "methods that need each client's upload are refused. It simulates the protocol's "
                           "arithmetic, failures and cost, see SECURITY.md.")

    @model_validator(mode="after")
    def _one_or_the_other(self) -> "FederationConfig":
        if self.secure and self.robust is not None:
            raise ValueError(f"secure = true and robust = {self.robust} exclude each other: a robust rule looks at "
                             "each client's part, and in a masked sum nobody can")
        if self.sampling == "poisson" and self.over_select:
            raise ValueError("over_select asks for more clients than so many, and sampling = poisson for no number of "
                             "them; leave one of them out")
        return self


class PrivacyConfig(Section):
    """Noise on what clients upload once, the sums over their samples."""

    epsilon: float | None = setting(None, "The epsilon of differential privacy, for each sample, of the sums that "
                                    "clients upload once after the last round; null adds no noise.", gt=0, le=1000)
    delta: float = setting(1e-5, "The probability with which epsilon may be exceeded; less than one over the number of "
                           "samples.", gt=0, lt=1)
    clip: float = setting(1.0, "With privacy.epsilon, the length to which longer features are cut.", gt=0, le=MOST)
    update_epsilon: float | None = setting(None, "The epsilon of differential privacy, for each client, of the models "
                                           "of all rounds; the run ends before it is exceeded. Null adds no noise.",
                                           gt=0, le=1000)
    noise_multiplier: float = setting(1.0, "With privacy.update_epsilon, the noise in a sum of updates, in units of "
                                      "privacy.update_clip.", gt=0, le=MOST)
    update_clip: float = setting(1.0, "With privacy.update_epsilon, the length to which longer updates are cut.", gt=0,
                                 le=MOST)

    @property
    def longest(self) -> float | None:
        """The length that features are cut to; None leaves them."""
        return None if self.epsilon is None else self.clip

    @model_validator(mode="after")
    def _one_unit(self) -> "PrivacyConfig":
        if self.epsilon is not None and self.update_epsilon is not None:
            raise ValueError("epsilon hides samples and update_epsilon hides clients: budgets that do not add up; set "
                             "one of them")
        return self
