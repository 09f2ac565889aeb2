"""Protected uploads and means with clients on Ray have the bits of one process, even after an actor is killed."""

import pytest
from tiny import CPU, configure, make_setup
from trouble import Private

from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.experiment import Experiment
from raylt.core.fleet.client_host import ClientHost
from raylt.core.protection import masking
from raylt.methods.classifiers.fedncm import FedNCM
from raylt.methods.fedavg import FedAvg

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NOISE = {"epsilon": 5.0, "delta": 1e-4, "clip": 3.0}
CASES = {
    "secure": (FedAvg(), {"federation": {"secure": True}}),
    "secure statistics": (FedNCM(), {"federation": {"secure": True}}),
    "median": (FedAvg(), {"federation": {"robust": "median"}}),
    "clipped mean": (FedAvg(), {"federation": {"robust": "norm_clipped_mean"}}),
    "noise": (FedNCM(), {"privacy": NOISE}),
    "noise in a secure sum": (FedNCM(), {"privacy": NOISE, "federation": {"secure": True}}),
}


def finish(experiment):
    reports = []
    while not experiment.done:
        reports.append(experiment.step())
    model = experiment.method.global_model(experiment.server).state_dict()
    return hash_tensors(dict(model)), [(sorted(report.retried), sorted(report.lost)) for report in reports]


@pytest.fixture
def on_ray(make_fleet, tiny_task, tmp_path):
    """Return `on_ray(config, method)`, which runs an experiment on two actors and returns its end."""

    def run(config, method):
        fleet = make_fleet(config, 2, method)
        end = finish(Experiment(make_setup(config, method), tiny_task, fleet, CPU, tmp_path))
        fleet.close()
        return end

    return run


def test_protected_runs_have_the_bits_of_one_process(on_ray, make_experiment, tiny_task, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "raylt.core.protection.sample_dp.secrets.randbits", lambda bits: 7
    )  # makes the noise reproducible
    ends = {}
    for name, (method, parts) in CASES.items():
        config = configure(**parts)
        ends[name] = finish(make_experiment(config, tiny_task, tmp_path, method))
        assert on_ray(config, method) == ends[name], name
    assert len({end for end, _ in ends.values()}) == len(CASES)  # each protection changes the result


def test_an_actor_killed_in_a_round_of_secure_sums_leaves_no_mark(on_ray, make_experiment, tiny_task, tmp_path):
    config = configure(federation={"secure": True})
    undisturbed, _ = finish(make_experiment(config, tiny_task, tmp_path, Private()))
    end, troubles = on_ray(config, Private(victims=(0, 5), folder=str(tmp_path)))
    assert end == undisturbed
    assert troubles == [([0, 5], []), ([], [])]


class Gone(ClientHost):
    """Loses client 2 in every training, as `Private` does on Ray, but without ending a process."""

    def run(self, fn, message, round, id, shard, private):
        if fn.__name__ == "train" and id == 2:
            raise OSError("gone")
        return super().run(fn, message, round, id, shard, private)


def test_a_secure_round_continues_without_a_client_that_dies_more_often_than_retries_allow(
    make_fleet, make_experiment, tiny_task, tmp_path, monkeypatch
):
    shares_used = []
    join = masking.join

    def counting_join(shares):
        shares_used.append(len(shares))
        return join(shares)

    monkeypatch.setattr(masking, "join", counting_join)
    config = configure(federation={"secure": True, "retries": 1, "rounds": 1})
    method = Private(victims=(2,), times=2, folder=str(tmp_path))
    fleet = make_fleet(config, 2, method)
    on_ray = Experiment(make_setup(config, method), tiny_task, fleet, CPU, tmp_path)
    report = on_ray.step()
    assert (report.lost, report.participants) == ([2], [0, 1, 3, 5])
    # the four remaining clients' seeds and the fifth's mask key, each from the four shares that it needs
    assert shares_used == [4] * 5
    masked, plain = (
        make_experiment(
            configure(federation={"retries": 0, "rounds": 1} | more), tiny_task, tmp_path, Private(), host=Gone
        )
        for more in ({"secure": True}, {})
    )
    assert [other.step().lost for other in (masked, plain)] == [[2], [2]]
    ends = [dict(each.server.model.state_dict()) for each in (on_ray, masked, plain)]
    assert hash_tensors(ends[0]) == hash_tensors(ends[1])
    furthest = max((value - ends[0][name]).abs().max() for name, value in ends[2].items() if value.is_floating_point())
    assert 0 < furthest < 1e-6
    fleet.close()
