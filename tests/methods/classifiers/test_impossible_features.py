"""Sums that are impossible for any features, or behind a ReLU, are rejected, and the error names their sender alone."""

import pytest
import torch
from small_runs import QUICK
from tiny import configure, make_experiment

from raylt.methods import METHODS

METHOD_NAMES = ("ccvr", "noisymeans", "fedncm", "sfd", "fed3r")


def negated(parts):
    """Return the sums of a reply for features of the opposite sign."""
    if "b" in parts:  # Fed3R's sums, whose last row has counts
        sign = torch.ones(len(parts["b"]), 1)
        sign[:-1] = -1
        return parts | {"b": sign * parts["b"]}
    return parts | {"classes": {c: sums | {"z": -sums["z"]} for c, sums in parts["classes"].items()}}


def halved(parts):
    """Return the sums of a reply with second moments below the squares of the means."""
    return parts | {"classes": {c: sums | {"zz": sums["zz"] / 2} for c, sums in parts["classes"].items()}}


def lying(name, lie):
    """Return a method in which client 0 sends other sums than those of its features."""
    kind = METHODS[name]

    def statistics(self, client, message):
        reply = kind.statistics(self, client, message)
        return reply if client.id else client.reply(**lie(reply.tree))

    return type(kind.__name__, (kind,), {"statistics": statistics, "__module__": __name__})(**QUICK.get(name, {}))


@pytest.mark.parametrize(
    ("name", "lie", "word"),
    [
        *((name, negated, "negative") for name in METHOD_NAMES),
        *((name, halved, "covariance") for name in ("ccvr", "noisymeans", "sfd")),
    ],
)
def test_a_client_that_claims_impossible_features_is_rejected(tiny_task, tmp_path, name, lie, word):
    experiment = make_experiment(configure(federation={"rounds": 1}), tiny_task, tmp_path, lying(name, lie))
    experiment.step()
    rejected = experiment.step().rejected
    assert list(rejected) == [0]
    assert word in rejected[0]
