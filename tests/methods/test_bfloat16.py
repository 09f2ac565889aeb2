"""With `local.precision=bfloat16` clients train in bfloat16, in loops of their own as well.

A pass in float32 would take twice as long, and give other results than the setting says.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from small_runs import QUICK
from torch import nn

from raylt.contract.case import Case
from raylt.core.fleet.client_host import ClientHost
from raylt.methods import METHODS

# methods with loops of their own; the other methods train by `sgd` alone and run with the slow tests
QUICKLY = ("fedavg", "apfl", "fedafa", "fedala", "fedetf", "pfedme")
# FedAFA trains a layer with a convolution only above this cut
FIELDS: dict[str, dict[str, Any]] = {"fedafa": {"cut": "stage1"}}


def client_function(frame: FrameType | None) -> str | None:
    """Return the name of the function that a client host is running, or None outside of a client's call."""
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        if "self" in frame.f_locals and isinstance(frame.f_locals["self"], ClientHost):
            return names[-2] if len(names) > 1 else None
        frame = frame.f_back
    return None


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow)
        for name, kind in METHODS.items()
        if not kind.learns_prompts  # whose encoder is frozen
    ],
)
def test_clients_train_in_the_precision_of_the_setting(name, tmp_path: Path, monkeypatch):
    kind = METHODS[name]
    case = Case(kind(**QUICK.get(name, {}) | FIELDS.get(name, {})), kind.problems[0], tmp_path)
    forward = nn.Conv2d.forward
    trained: set[tuple[str, bool]] = set()

    def watched(self, x):
        function = client_function(sys._getframe())
        if self.training and function is not None:
            trained.add((function, torch.is_autocast_enabled("cpu")))
        return forward(self, x)

    monkeypatch.setattr(nn.Conv2d, "forward", watched)
    case.run(case.config(local={"batch": 8, "precision": "bfloat16"}))
    assert trained
    assert {function for function, in_bfloat16 in trained if not in_bfloat16} == set()
