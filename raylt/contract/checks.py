"""The checks of runs. Each one's docstring is what a method keeps to; what it does instead is said by `Broken`."""

import math
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace

import torch
from safetensors.torch import load_file
from torch import Tensor

from raylt import metrics, tree
from raylt.contract.case import CPU, SOME, Case
from raylt.contract.declarations import declares_its_fields, expect, has_a_name_and_a_paper, is_a_value
from raylt.contract.hosts import Backwards, FailsFirst, NewHosts, OwnHosts
from raylt.contract.trace import Trace, fingerprint, finish
from raylt.core import checkpoint
from raylt.core.evaluation import confusion_of
from raylt.core.setup import private_entries
from raylt.data.samples import Samples
from raylt.models.split import load_entries

Check = Callable[[Case], None]
NEW = 3                 # a client that holds a single sample
TROUBLES = "lost", "retried", "rejected"


def ends_with_a_judged_model(case: Case) -> None:
    """runs two rounds, and its last phase, with all or some clients, and ends with a judged model"""
    for trace in (case.straight, case.partial):
        expect([r.phase for r in trace.reports[:2]] == ["round", "round"], "the first two steps are not rounds")
        accuracy = trace.reports[-1].accuracy
        expect(accuracy is not None and 0 <= accuracy <= 1, f"the accuracy is {accuracy}")
        trouble = [(kind, getattr(r, kind)) for r in trace.reports for kind in TROUBLES if getattr(r, kind)]
        expect(not trouble, f"calls failed: {trouble}")


def says_whether_it_finishes(case: Case) -> None:
    """has a last phase if and only if `finishes` says so"""
    phases = [r.phase for r in case.straight.reports]
    expect(phases == ["round"] * 2 + ["finish"] * bool(case.method.finishes), f"the phases are {phases}")
    experiment = case.straight.experiment
    if not case.method.finishes:
        before = fingerprint(dict(experiment.server.model.state_dict()))
        with experiment.rehearsal():
            after = fingerprint(dict(experiment.server.model.state_dict()))
            expect(after == before, "`finish` does something, but `finishes` is false")


def is_left_as_it_was(case: Case) -> None:
    """is not changed by a run"""
    expect(case.straight.experiment.method == type(case.method)(**case.method.model_dump()), "a field has changed")


def same_seed_same_bits(case: Case) -> None:
    """gives the same bits for the same seed, with all and with some clients"""
    _same(case.straight, case.run())
    _same(case.partial, case.run(case.config(SOME)))


def other_seed_other_bits(case: Case) -> None:
    """gives another model for another seed"""
    other = case.run(case.config(seed=1)).bits["model_sha256"]
    expect(other != case.straight.bits["model_sha256"], "the seed does not matter")


def order_of_clients(case: Case) -> None:
    """does not depend on the order in which clients run"""
    _same(case.straight, case.run(fleet=Backwards))


def spread_over_processes(case: Case) -> None:
    """does not depend on which process runs which client, nor on what a process remembers"""
    _same(case.straight, case.run(host=OwnHosts))
    _same(case.straight, case.run(host=NewHosts))


def retried_calls(case: Case) -> None:
    """is not changed by calls that fail and are made again"""
    again = case.run(host=FailsFirst)
    expect(set(again.reports[0].retried) == set(again.experiment.fleet.ids), "not every client was asked again")
    _same(case.straight, again)


def judging_changes_nothing(case: Case) -> None:
    """is not changed by judging clients' own models in between"""
    _same(case.straight, case.run(case.config(evaluation={"personal": 1})))


def resumed_after_every_step(case: Case) -> None:
    """ends the same when it is saved and loaded after every step"""
    for config, straight in ((case.config(), case.straight), (case.config(SOME), case.partial)):
        shutil.rmtree(case.folder / "checkpoints", ignore_errors=True)
        experiment, reports = case.experiment(config), []
        while True:
            reports.append(experiment.step())
            if experiment.done:
                break
            experiment.save(reports[-1])
            saved, faults = checkpoint.latest(case.folder / "checkpoints")
            expect(saved is not None and not faults, f"the checkpoint cannot be read: {faults}")
            assert saved is not None
            experiment = case.experiment(config)
            experiment.load(saved)
        resumed = finish(experiment, reports)
        _same(straight, resumed)
        expect([r.accuracy for r in resumed.reports] == [r.accuracy for r in straight.reports], "accuracies differ")


def messages_and_replies_are_plain(case: Case) -> None:
    """sends trees of finite CPU tensors, numbers and texts that can be pickled"""
    host = case.straight.experiment.fleet._host         # pyright: ignore[reportAttributeAccessIssue]
    for sent in [*host.messages, *(reply for *_, reply in host.replies)]:
        for path, leaf in tree.leaves(sent):
            if isinstance(leaf, Tensor):
                expect(leaf.device == CPU and not leaf.requires_grad, f"{path} is not a plain CPU tensor")
                expect(torch.isfinite(leaf).all(), f"{path} is not finite")
            else:
                expect(leaf is None or isinstance(leaf, str | int | float), f"{path} is a {type(leaf).__name__}")
                expect(not isinstance(leaf, float) or math.isfinite(leaf), f"{path} is {leaf}")
        expect(fingerprint(pickle.loads(pickle.dumps(sent))) == fingerprint(sent), "pickling changes it")


def leaves_messages_alone(case: Case) -> None:
    """does not change the message that it got"""
    host = case.straight.experiment.fleet._host         # pyright: ignore[reportAttributeAccessIssue]
    expect(not host.changed, f"{', '.join(sorted(host.changed))} changed its message")


def keeps_private_entries(case: Case) -> None:
    """receives the shared entries and keeps the private ones, also with local running statistics"""
    for batchnorm in ("average", "local"):
        config = case.config(federation={"batchnorm": batchnorm})
        model, other = (case.setup(c).new_model(case.task.facts) for c in (
            config, config.model_copy(update={"seed": 1})))
        with torch.no_grad():
            for value in other.state_dict().values():
                value.add_(1)
        before = fingerprint(private_entries(case.method, model))
        load_entries(model, tree.snapshot(case.method.shared(other)))
        expect(fingerprint(private_entries(case.method, model)) == before, "a shared entry overwrites a private one")
        expect(fingerprint(case.method.shared(model)) == fingerprint(case.method.shared(other)),
               "`shared` of two models has not the same names")
        names = case.method.shared(model).keys() | private_entries(case.method, model).keys()
        expect(names == model.state_dict().keys(), "`shared` names entries that the model has not")


def local_running_statistics(case: Case) -> None:
    """runs with federation.batchnorm = local, and its clients are then judged with the statistics that they keep"""
    trace, judged = (case.run(case.config(federation={"batchnorm": "local"}, evaluation={"personal": personal}))
                     for personal in (0, 1))
    _same(trace, judged)
    expect(trace.experiment.server.model.stays, "the model lost what stays at the clients: build it from `base`")
    expect(trace.reports[-1].by_client is not None, "clients are not judged")


def joining_late(case: Case) -> None:
    """judges clients that join after training, and nothing else depends on them"""
    traces = []
    for twin in (0, 1):                     # what the newcomer holds is another client's
        shards = (*case.task.shards[:NEW], case.task.shards[twin], *case.task.shards[NEW + 1:])
        counts = case.task.client_counts.copy()
        counts[NEW] = counts[twin]
        task = replace(case.task, shards=shards, client_counts=counts, newcomers=(NEW,))
        traces.append(case.run(task=task))
    for trace in traces:
        figures = trace.reports[-1].figures["new_clients"]
        expect(figures["count"] == 1 and 0 <= figures["matched"] <= 1, f"the figures of the newcomer are {figures}")
        expect(f"client {NEW}" not in trace.bits, "what a newcomer did is kept")
        expect(not any(NEW in r.participants for r in trace.reports), "a newcomer took part in a round")
    _same(*traces)


def over_selection(case: Case) -> None:
    """runs with federation.over_select"""
    trace = case.run(case.config(SOME, federation={"over_select": 0.5}))
    counts = {len(r.participants) for r in trace.reports if r.phase == "round"}
    expect(counts == {2}, f"rounds had {counts} participants, 2 are asked for")


def plain_list_of_clients(case: Case) -> None:
    """runs the same when `sample` returns a plain list of ids"""
    method = case.with_sample(lambda own, *call: list(own(*call)))
    trace = case.run(case.config(SOME), method=method)
    _same(case.partial, trace)
    expect([r.participants for r in trace.reports] == [r.participants for r in case.partial.reports],
           "the participants differ")


def predicts_what_was_judged(case: Case) -> None:
    """predicts from the exported file what was judged"""
    experiment, task = case.straight.experiment, case.task
    experiment.conclude()                               # other runs have left their models since
    exported = load_file(case.folder / "model.safetensors")
    model = case.method.global_model(experiment.server).eval()
    entries = {name: value.contiguous() for name, value in model.state_dict().items()}
    expect(fingerprint(exported) == fingerprint(entries), "the exported entries are not those of `global_model`")
    samples = Samples(task.test, task.facts, CPU)
    accuracy = metrics.accuracy(confusion_of(lambda x: case.method.predict(model, x), samples, task.classes, 7))
    judged = case.straight.reports[-1].global_accuracy
    expect(judged is not None and math.isclose(accuracy, judged, abs_tol=1e-6), f"judged {judged}, it gives {accuracy}")


def gives_one_logit_per_class(case: Case) -> None:
    """gives finite logits, one for each class, and for each pixel where labels are maps"""
    height, width, channels = case.task.shape
    model, x = case.method.global_model(case.straight.experiment.server).eval(), torch.zeros(3, channels, height, width)
    with torch.no_grad():
        logits = case.method.predict(model, x)
    places = (height, width) if case.kind == "segmentation" else ()
    expect(logits.shape == (3, case.task.classes, *places), f"logits have the shape {list(logits.shape)}")
    expect(torch.isfinite(logits).all(), "logits are not finite")


def hands_over_values(case: Case) -> None:
    """does not change a tensor after it was handed over to a reply or to the client's state"""
    trace = case.run(case.config(federation={"retries": 0}))
    lost = {id for r in trace.reports for id in r.lost}
    expect(not lost, f"clients {sorted(lost)} were lost")


def _same(straight: Trace, other: Trace) -> None:
    differing = [name for name in straight.bits | other.bits if straight.bits.get(name) != other.bits.get(name)]
    expect(not differing, f"the bits differ: {', '.join(differing)}")


CHECKS: tuple[Check, ...] = (
    has_a_name_and_a_paper, is_a_value, declares_its_fields, ends_with_a_judged_model, says_whether_it_finishes,
    hands_over_values, is_left_as_it_was, same_seed_same_bits, other_seed_other_bits, order_of_clients,
    spread_over_processes, retried_calls, judging_changes_nothing, resumed_after_every_step,
    messages_and_replies_are_plain, leaves_messages_alone, keeps_private_entries, local_running_statistics,
    joining_late, over_selection, plain_list_of_clients, predicts_what_was_judged, gives_one_logit_per_class)
