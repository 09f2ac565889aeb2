"""The check that enough clients of a call sent a valid reply."""

import pytest
import torch
from refusals import refused
from tiny import configure

from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.quorum import Call, Quorum
from raylt.errors import ClientError, Diverged, TooFewReplies

CALL = Call(3, "train", Cohort([0, 1, 2, 3]), {"model": {"w": torch.tensor([1.0, -7.0])}})


def errors(number: int) -> list[ClientError]:
    return [ClientError(id, 3, "train", "a NaN", code="reply.not-finite") for id in range(number)]


@pytest.mark.parametrize(("quorum", "needed"), [(0.75, 3), (0.6, 3), (0.5, 2), (0.01, 1)])
def test_the_quorum_is_rounded_up_and_at_least_one_client(quorum, needed):
    config = configure(federation={"quorum": quorum})
    Quorum().check(config, CALL, needed, [ClientError(0, 3, "train", "left")])
    with refused("reply.too-few", TooFewReplies, usable=needed - 1, needed=needed, asked=4):
        Quorum().check(config, CALL, needed - 1, [ClientError(0, 3, "train", "left")])


def test_the_quorum_is_a_share_of_the_replies_that_the_call_needs():
    call = CALL._replace(cohort=Cohort(range(120), needed=100))  # twenty more were asked than are needed
    config = configure(federation={"quorum": 0.07})  # 0.07 * 100 is a little more than 7
    left = [ClientError(0, 3, "train", "left")]
    Quorum().check(config, call, 7, left)
    with refused("reply.too-few", TooFewReplies, usable=6, needed=7, asked=100):
        Quorum().check(config, call, 6, left)


def test_training_has_diverged_if_more_than_half_of_the_clients_say_so():
    config = configure(federation={"quorum": 1.0})
    with refused("reply.too-few", TooFewReplies):
        Quorum().check(config, CALL, 2, errors(2))
    with refused("training.diverged", Diverged, round=3, sent=7.0):
        Quorum().check(config, CALL, 1, errors(3))


def test_the_round_in_which_training_diverged_is_the_first_of_those_in_a_row():
    quorum, config = Quorum(), configure(federation={"quorum": 0.5})
    quorum.check(config, CALL._replace(round=4), 2, errors(1))
    for round in (6, 7):
        quorum.check(config, CALL._replace(round=round), 2, errors(1))
    with refused("training.diverged", Diverged, round=6):
        quorum.check(config, CALL._replace(round=8), 0, errors(4))
