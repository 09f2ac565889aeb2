from pathlib import Path

import pytest
import torch
from bpfed_runs import open_client
from killed import resume, run_and_kill
from tiny import Recorder, configure, fingerprint, make_experiment, private_states

from raylt.core.checkpoint import checkpoint
from raylt.core.checkpoint.client_states import SavedStates
from raylt.errors import TooFewReplies
from raylt.methods.bpfed.method import BPFed


def test_client_without_features_says_which_call_it_missed(tiny_task):
    client = open_client(tiny_task)
    with pytest.raises(RuntimeError, match=r"did not take part in BPFed.covariance"):
        BPFed().retrain(client, {"covariance": torch.zeros(64 * 65 // 2)})


def test_finish_that_broke_off_between_its_halves_is_repeated_to_the_same_bits(finished, tiny_task, tmp_path):
    class Breaks(Recorder):
        def run(self, fn, message, round, id, shard, private):
            if fn.__name__ == "retrain" and id == 2:
                raise OSError("the machine goes down")
            return super().run(fn, message, round, id, shard, private)

    method = BPFed()
    experiment = make_experiment(configure(federation={"quorum": 1.0}), tiny_task, tmp_path, method, host=Breaks)
    for _ in range(2):
        experiment.save(experiment.step())
    with pytest.raises(TooFewReplies, match="retrain: 4 of 5"):
        experiment.step()
    assert "covariance" in {name for name, *_ in experiment.fleet._host.replies}
    again = make_experiment(configure(federation={"quorum": 1.0}), tiny_task, tmp_path, method)
    saved, _ = checkpoint.latest(tmp_path / "checkpoints")
    assert saved is not None
    again.load(saved)
    again.step()
    straight, repeated = private_states(finished[0]), private_states(again)
    assert fingerprint(again.server.model.state_dict()) == fingerprint(finished[0].server.model.state_dict())
    assert {id: fingerprint(state) for id, state in repeated.items()} == {
        id: fingerprint(state) for id, state in straight.items()
    }


@pytest.mark.slow
def test_killed_during_retraining_and_resumed_it_ends_with_the_same_classifiers(tmp_path):
    settings = ["method=bpfed", "federation.rounds=2", "local.epochs=1", "data.clients=4", "method.retrain_epochs=5"]

    def classifiers(folder: Path) -> dict[int, str]:
        saved, _ = checkpoint.latest(folder / "checkpoints")
        assert saved is not None
        assert saved.facts["step"] == 3
        kept = SavedStates(saved)
        return {id: fingerprint(kept.read(id)) for id in kept.part_of}

    run_and_kill(tmp_path, settings, "raylt.methods.bpfed.method", "fit_classifier", 3)
    assert len((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()) == 2
    straight, killed = resume(tmp_path)
    assert straight["model_sha256"] == killed["model_sha256"]
    assert straight["accuracy"] == killed["accuracy"]
    assert len(classifiers(tmp_path / "straight")) == 4
    assert classifiers(tmp_path / "straight") == classifiers(tmp_path / "killed")
