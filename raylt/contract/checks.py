"""The checks that every method must pass, and the functions that run them.

The docstring of a check is the sentence that `raylt check` prints. A failed check raises `Violation`.
"""

import math
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from raylt import metrics, tree
from raylt.contract.arrival import bits_elsewhere
from raylt.contract.case import CPU, SOME, Case
from raylt.contract.declarations import (
    Violation,
    declares_its_fields,
    expect,
    has_a_name_and_a_paper,
    is_a_value,
    names_stages_and_methods,
)
from raylt.contract.fields import acts_from_its_stage_on
from raylt.contract.hosts import Backwards, FailsFirst, InStacks, NewHosts, OwnHosts
from raylt.contract.lies import FRAMEWORK_CALLS, LIAR, Asked, Lies, counts_of_part, wrong_leaves, wrong_weights
from raylt.contract.trace import Trace, fingerprint, finish
from raylt.core.checkpoint import checkpoint
from raylt.core.client import Reply
from raylt.core.evaluation.counts import confusion_of
from raylt.core.fleet.schema import Schema
from raylt.core.method import Method
from raylt.core.setup import private_entries
from raylt.core.training.stacked_sgd import has_avx512
from raylt.data.samples import Samples
from raylt.errors import user_fault
from raylt.models.split import load_entries
from raylt.models.trainable import whole_model

Check = Callable[[Case], None]
Question = tuple[str, Schema, int, Reply]  # (call, schema of the replies, client, its reply)
Honest = tuple[Schema, int, Reply]
NEW = 3  # A client with a single sample.
TROUBLES = "lost", "retried", "rejected"
STACKED_DIFFERENCE = 1e-5  # Maximum difference between results in stacks and alone; rounding causes 3e-7.


def ends_with_a_judged_model(case: Case) -> None:
    """The method runs two rounds and its last phase with all or with some clients, and its final model is evaluated."""
    for trace in (case.straight, case.partial):
        expect([r.phase for r in trace.reports[:2]] == ["round", "round"], "the first two steps are not rounds")
        accuracy = trace.reports[-1].accuracy
        expect(accuracy is not None and 0 <= accuracy <= 1, f"the accuracy is {accuracy}")
        trouble = [(kind, getattr(r, kind)) for r in trace.reports for kind in TROUBLES if getattr(r, kind)]
        expect(not trouble, f"calls failed: {trouble}")


def says_whether_it_finishes(case: Case) -> None:
    """The method sets `finishes` if and only if it has a phase after the last round."""
    phases = [r.phase for r in case.straight.reports]
    expect(phases == ["round"] * 2 + ["finish"] * bool(case.method.finishes), f"the phases are {phases}")
    experiment = case.straight.experiment
    if not case.method.finishes:
        before = fingerprint(dict(experiment.server.model.state_dict()))
        with experiment.rehearsal():
            after = fingerprint(dict(experiment.server.model.state_dict()))
            expect(after == before, "`finish` does something, but `finishes` is false")


def is_left_as_it_was(case: Case) -> None:
    """A run does not change the method."""
    method = case.straight.experiment.method
    expect(method == type(method)(**case.fields), "a field has changed")


def sets_no_attributes(case: Case) -> None:
    """Client functions set no attributes on a client or its model."""
    for trace in (case.straight, case.partial):
        host = trace.experiment.fleet._host  # pyright: ignore[reportAttributeAccessIssue]
        for function, attribute in host.attributes.items():
            raise Violation(f"{function} sets {attribute}. Keep it in client.state, or in a local variable")


def same_seed_same_bits(case: Case) -> None:
    """The same seed gives the same bits, with all and with some clients."""
    _same(case.straight, case.run())
    _same(case.partial, case.run(case.config(SOME)))


def other_seed_other_bits(case: Case) -> None:
    """Another seed gives another model."""
    other = case.run(case.config(seed=1)).bits["model_sha256"]
    expect(other != case.straight.bits["model_sha256"], "the seed has no effect")


def order_of_clients(case: Case) -> None:
    """The result does not depend on the order in which clients run."""
    _same(case.straight, case.run(fleet=Backwards))


def spread_over_processes(case: Case) -> None:
    """The result depends neither on which process runs a client nor on state that a process keeps."""
    _same(case.straight, case.run(host=OwnHosts))
    _same(case.straight, case.run(host=NewHosts))


def trains_in_stacks_as_alone(case: Case) -> None:
    """If the method is `stackable`, training in stacks and alone agree, and bits do not depend on other clients."""
    config = case.config(local={"batch": 8, "stacked": "auto"})
    experiment = case.experiment(config, host=InStacks)
    host = experiment.fleet._host  # pyright: ignore[reportAttributeAccessIssue]
    if host.why_alone is not None:
        return
    trace = finish(experiment)
    expect(host.compared > 0, "no client trains in a stack")
    expect(host.difference <= STACKED_DIFFERENCE, f"training in a stack and alone differ by {host.difference:.1e}")
    if has_avx512():  # on other processors, bits would depend on the other clients, so runs do not stack clients
        _same(trace, case.run(config, host=OwnHosts))


def travels_to_another_process(case: Case) -> None:
    """The method can be sent to another process with the source of its module, and gives the same bits there."""
    bits = bits_elsewhere(case)
    differing = sorted(name for name, value in case.straight.bits.items() if bits.get(name) != value)
    expect(not differing, f"the bits differ in another process: {', '.join(differing)}")


def retried_calls(case: Case) -> None:
    """Calls that fail and are repeated do not change the result."""
    again = case.run(host=FailsFirst)
    expect(set(again.reports[0].retried) == set(again.experiment.fleet.ids), "not every client was asked again")
    _same(case.straight, again)


def judging_changes_nothing(case: Case) -> None:
    """Evaluating the clients' own models between rounds does not change the result."""
    _same(case.straight, case.run(case.config(evaluation={"personal": 1})))


def resumed_after_every_step(case: Case) -> None:
    """Saving and loading after every step does not change the result."""
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
    """Messages and replies are trees of finite CPU tensors, numbers and strings that can be pickled."""
    host = case.straight.experiment.fleet._host  # pyright: ignore[reportAttributeAccessIssue]
    for sent in [*host.messages, *(reply for *_, reply in host.replies)]:
        for path, leaf in tree.leaves(sent):
            if isinstance(leaf, Tensor):
                expect(leaf.device == CPU and not leaf.requires_grad, f"{path} is not a plain CPU tensor")
                expect(torch.isfinite(leaf).all(), f"{path} is not finite")
            else:
                expect(leaf is None or isinstance(leaf, str | int | float), f"{path} is a {type(leaf).__name__}")
                expect(not isinstance(leaf, float) or math.isfinite(leaf), f"{path} is {leaf}")
        expect(
            fingerprint(pickle.loads(pickle.dumps(sent))) == fingerprint(sent), "pickling changes a message or reply"
        )


def leaves_messages_alone(case: Case) -> None:
    """Client functions do not change their message."""
    host = case.straight.experiment.fleet._host  # pyright: ignore[reportAttributeAccessIssue]
    expect(not host.changed, f"{', '.join(sorted(host.changed))} changed its message")


def keeps_private_entries(case: Case) -> None:
    """Clients load the shared entries of the server's model and keep the private entries of their own models.

    This also holds with local running statistics.
    """
    for batchnorm in ("average", "local"):
        config = case.config(federation={"batchnorm": batchnorm})
        model, other = (
            case.setup(c).new_model(case.task.spec) for c in (config, config.model_copy(update={"seed": 1}))
        )
        with torch.no_grad():
            for value in other.state_dict().values():
                value.add_(1)
        before = fingerprint(private_entries(case.method, model))
        load_entries(model, tree.snapshot(case.method.shared(other)))
        expect(fingerprint(private_entries(case.method, model)) == before, "a shared entry overwrites a private one")
        expect(
            fingerprint(case.method.shared(model)) == fingerprint(case.method.shared(other)),
            "`shared` returns different names for two models",
        )
        names = case.method.shared(model).keys() | private_entries(case.method, model).keys()
        expect(names == model.state_dict().keys(), "`shared` returns entries that the model does not have")


def local_running_statistics(case: Case) -> None:
    """The method runs with federation.batchnorm = local, and clients are evaluated with their own statistics."""
    if case.config().trainable == "classifier":
        return  # the statistics of a frozen encoder do not change
    config = case.config(federation={"batchnorm": "local"})
    expect(
        case.setup(config).new_model(case.task.spec).local_buffers,
        "the model has lost the entries that stay at the clients: build it from `base`",
    )
    trace, judged = (
        case.run(case.config(federation={"batchnorm": "local"}, evaluation={"personal": personal}))
        for personal in (0, 1)
    )
    _same(trace, judged)
    expect(trace.reports[-1].by_client is not None, "clients are not evaluated")


def joining_late(case: Case) -> None:
    """Clients that join after training are evaluated, and no other result depends on them."""
    traces = []
    for twin in (0, 1):  # the new client has the samples of another client
        shards = (*case.task.shards[:NEW], case.task.shards[twin], *case.task.shards[NEW + 1 :])
        counts = case.task.client_counts.copy()
        counts[NEW] = counts[twin]
        task = replace(case.task, shards=shards, client_counts=counts, new_clients=(NEW,))
        traces.append(case.run(task=task))
    for trace in traces:
        figures = trace.reports[-1].figures["new_clients"]
        expect(figures["count"] == 1 and 0 <= figures["matched"] <= 1, f"the figures of the new client are {figures}")
        expect(f"client {NEW}" not in trace.bits, "state of a new client is kept")
        expect(not any(NEW in r.participants for r in trace.reports), "a new client took part in a round")
    _same(*traces)


def over_selection(case: Case) -> None:
    """The method runs with federation.over_select."""
    trace = case.run(case.config(SOME, federation={"over_select": 0.5}))
    counts = {len(r.participants) for r in trace.reports if r.phase == "round"}
    expect(counts == {2}, f"rounds had {counts} participants instead of 2")


def plain_list_of_clients(case: Case) -> None:
    """The result is the same when `sample` returns a plain list of ids."""
    method = case.with_sample(lambda own, *call: list(own(*call)))
    trace = case.run(case.config(SOME), method=method)
    _same(case.partial, trace)
    expect(
        [r.participants for r in trace.reports] == [r.participants for r in case.partial.reports],
        "the participants differ",
    )


def hides_samples_in_noise(case: Case) -> None:
    """If the method has `sums_samples`, its last phase runs with privacy.epsilon and uploads only bounded sums."""
    method = case.method
    if method.sums_samples and method.finishes and not method.sees_each:
        case.run(case.config(privacy={"epsilon": 1000.0}))


def predicts_what_was_judged(case: Case) -> None:
    """The exported file gives the same predictions as the evaluation, unless no round trains the global model."""
    experiment, task = case.straight.experiment, case.task
    experiment.export_model()  # later runs have replaced the exported file
    exported = load_file(case.folder / "model.safetensors")
    model = whole_model(case.method.global_model(experiment.server)).eval()
    entries = {name: value.contiguous() for name, value in model.state_dict().items()}
    expect(fingerprint(exported) == fingerprint(entries), "the exported entries differ from `global_model`")
    if not experiment.evaluator.trains_global:
        return
    samples = Samples(task.test, task.spec, CPU)
    accuracy = metrics.accuracy(confusion_of(lambda x: case.method.predict(model, x), samples, task.classes, 7))
    judged = case.straight.reports[-1].global_accuracy
    expect(
        judged is not None and math.isclose(accuracy, judged, abs_tol=1e-6),
        f"the evaluated accuracy is {judged}, the exported file gives {accuracy}",
    )


def gives_one_logit_per_class(case: Case) -> None:
    """The model returns one finite logit per class; for label maps, one per class and pixel."""
    height, width, channels = case.task.shape
    model = case.method.global_model(case.straight.experiment.server).eval()
    x = torch.zeros(3, channels, height, width)
    with torch.no_grad():
        logits = case.method.predict(model, x)
    pixels = (height, width) if case.kind == "segmentation" else ()
    expect(logits.shape == (3, case.task.classes, *pixels), f"logits have the shape {list(logits.shape)}")
    expect(torch.isfinite(logits).all(), "logits are not finite")


def believes_no_wrong_count(case: Case) -> None:
    """The server rejects a reply with a wrong sample count, or with values that cannot be sums over samples."""
    fleet = case.straight.experiment.fleet
    assert isinstance(fleet, Asked)
    for call, name, counted, honest in _sums(fleet.asked, fleet.sizes):
        for schema, id, reply in honest[:2] + honest[3:4]:  # the last client has one sample
            for what, wrong in wrong_leaves(reply.tree[name], counted):
                accepted = schema.fault(id, replace(reply, tree=reply.tree | {name: wrong})) is None
                expect(
                    not accepted,
                    f"{call} accepts the part {name} with {what}. Declare what the server knows about it: "
                    "total.like(...).counting(...) or .over_samples(...)",
                )
    for call, schema, id, reply in fleet.asked:
        for what, weight in wrong_weights(reply.weight):
            expect(schema.fault(id, replace(reply, weight=weight)), f"{call} accepts {what}")


def _sums(asked: list[Question], sizes: Mapping[int, int]) -> Iterator[tuple[str, str, set[str], list[Honest]]]:
    """Yield the reply parts that are sums over samples, each as (call, part name, names of counts, replies).

    Names of counts are the ones that add up to the client's samples. The replies are correct.
    """
    calls: dict[tuple[str, str], list[Honest]] = {}
    for call, schema, id, reply in asked:
        for name, part in schema.parts.items():
            if part.kind == "total" or part.counted:
                calls.setdefault((call, name), []).append((schema, id, reply))
    for (call, name), honest in calls.items():
        counts = [(counts_of_part(reply.tree[name]), sizes[id]) for _, id, reply in honest]
        names = set.intersection(*({label for label, n in sums.items() if n == size} for sums, size in counts))
        yield call, name, names, honest


def lies_blame_nobody_else(case: Case) -> None:
    """The server rejects only the client that lies in every reply, and the run continues."""
    trace = case.run(case.config(federation={"quorum": 0.1}), host=Lies)
    blamed = {id for report in trace.reports for id in [*report.rejected, *report.lost]}
    expect(blamed <= {LIAR}, f"clients {sorted(blamed - {LIAR})} are blamed for a reply of client {LIAR}")


def declares_what_it_sees(case: Case) -> None:
    """The method names in `sees_each` the parts of replies that the server sees for every single client."""
    fleet = case.straight.experiment.fleet
    assert isinstance(fleet, Asked)
    own_calls = [schema for call, schema, _, _ in fleet.asked if call not in FRAMEWORK_CALLS]
    seen = {name for schema in own_calls for name, part in schema.parts.items() if part.kind == "each"}
    declared = set(case.method.sees_each)
    expect(
        seen == declared, f"`sees_each` names {_listed(declared)}, and `fleet.ask` asks for {_listed(seen)} by client"
    )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "no part"


def hands_over_values(case: Case) -> None:
    """A client function does not change a tensor after it has put it into a reply or the client's state."""
    trace = case.run(case.config(federation={"retries": 0}))
    lost = {id for r in trace.reports for id in r.lost}
    expect(not lost, f"clients {sorted(lost)} were lost")


def _same(straight: Trace, other: Trace) -> None:
    differing = [name for name in straight.bits | other.bits if straight.bits.get(name) != other.bits.get(name)]
    expect(not differing, f"the bits differ: {', '.join(differing)}")


CHECKS: tuple[Check, ...] = (
    has_a_name_and_a_paper,
    is_a_value,
    declares_its_fields,
    names_stages_and_methods,
    acts_from_its_stage_on,
    ends_with_a_judged_model,
    says_whether_it_finishes,
    believes_no_wrong_count,
    lies_blame_nobody_else,
    declares_what_it_sees,
    hands_over_values,
    is_left_as_it_was,
    sets_no_attributes,
    same_seed_same_bits,
    other_seed_other_bits,
    order_of_clients,
    spread_over_processes,
    trains_in_stacks_as_alone,
    travels_to_another_process,
    retried_calls,
    judging_changes_nothing,
    resumed_after_every_step,
    messages_and_replies_are_plain,
    leaves_messages_alone,
    keeps_private_entries,
    local_running_statistics,
    joining_late,
    over_selection,
    plain_list_of_clients,
    hides_samples_in_noise,
    predicts_what_was_judged,
    gives_one_logit_per_class,
)


@dataclass(frozen=True)
class Result:
    """The result of one check.

    Attributes:
        case: The method and the kind of problem.
        what: The rule that was checked.
        fault: Description of the violation; None if the method passes.
    """

    case: str
    what: str
    fault: str | None


def run_checks(method: Method) -> Iterator[Result]:
    """Run all checks in order, on each kind of problem that the method supports."""
    for kind in method.problems:
        with tempfile.TemporaryDirectory(prefix="raylt-check-") as folder:
            case = Case(method, kind, Path(folder))
            for check in CHECKS:
                yield Result(str(case), check.__doc__ or check.__name__, fault_of(check, case))


def fault_of(check: Check, case: Case) -> str | None:
    """Run a check and return the fault that it finds in a method, in one line; None if the method passes.

    An exception is reported with the innermost line of the user's own code.
    """
    case.raised.clear()
    try:
        check(case)
    except Violation as violation:
        return user_fault(case.raised[0]) if case.raised else str(violation)
    except Exception as error:  # any exception of the method's code
        return user_fault(case.raised[0] if case.raised else error)
    return None
