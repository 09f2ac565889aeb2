"""Short runs of FedSM, and clients in the middle of a run."""

import teachers
import tiny
import torch
from tiny import Recorder, configure, fingerprint, make_experiment, make_setup, private_states

from raylt.core.client import Client

QUICK = {"retrain_rounds": 1, "size": 5, "retrain_epochs": 2}


def run(task, folder, method, until=None, host=Recorder, fleet=None, **parts):
    more = {} if fleet is None else {"fleet": fleet}
    experiment = make_experiment(configure(**parts), task, folder, method, host=host, **more)
    reports = []
    while not experiment.done and len(reports) != until:
        reports.append(experiment.step())
    return experiment, reports


def prepare(method, task, config=None) -> None:
    setup = make_setup(config or configure(), method)
    method.prepare(task, setup.config, setup.new_model(task.spec))


def bits(experiment) -> dict[str, str]:
    states = {f"client {id}": fingerprint(state) for id, state in private_states(experiment).items()}
    return states | {
        "server": fingerprint(experiment.server.state),
        "model": fingerprint(experiment.server.model.state_dict()),
    }


def open_client(task, method, id=0, state=None, **parts) -> Client:
    client = tiny.open_client(task, method, id, configure(**parts))
    client.state = state or {}
    return client


def states_of(task) -> dict[str, torch.Tensor]:
    return {"phrase": torch.from_numpy(teachers.feature_arrays(task)["text"])}


def message_of(client, present=(True, True, True, True)):
    d, mask = client.model.dim, torch.tensor(present)
    return {
        "means": torch.randn(len(mask), d, generator=torch.Generator().manual_seed(0)) * mask[:, None],
        "present": mask,
    }
