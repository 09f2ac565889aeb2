"""The check that a run continues with the entries of its checkpoint."""

import pytest
from refusals import refused
from tiny import configure, make_setup

from raylt.core.checkpoint.frozen import check_frozen
from raylt.errors import CheckpointError


@pytest.mark.parametrize(
    "change", [lambda model: model | {"encoder.more": 0}, lambda model: dict(list(model.items())[1:])]
)
def test_a_checkpoint_with_other_entries_is_refused(tiny_task, change):
    config = configure()
    model = make_setup(config).new_model(tiny_task.spec)
    entries = dict(model.state_dict())
    check_frozen({"model": entries}, model, config)
    with refused("model.weights-mismatch", CheckpointError, key="model"):
        check_frozen({"model": change(entries)}, model, config)
