"""Reports as tidy pandas frames: one value a row."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

Report = dict[str, Any]
WHOLE = "all"           # the group of a figure that is of everything


def metrics(reports: list[Report]) -> "DataFrame":
    """The figures of every step.

    Returns:
        Columns step, phase ("round" or "finish"), metric, group, value (float). A step has rows only for what was
        judged in it. By metric, the groups are

        - accuracy: all, many, medium, few; global_accuracy, macro, miou: all. In [0, 1]
        - owned, matched, global, client_miou, and local where clients have test images: mean and worst_decile over
          the clients
        - bytes_up, bytes_down: the client function whose messages and replies they are
        - seconds: training, evaluation; stage_seconds: the stage
        - participants, lost, retried, rejected: all. A number of clients
        - whatever the method reports as a number: method; of several numbers with names, the names ("shares", "mmd")
        - new_clients: count, and owned, matched, global, miou and worst_decile of those that join after training
        - validation: accuracy, many, medium, few, owned, matched and miou on the validation part, where there is one
    """
    from pandas import DataFrame
    rows = [(report["step"], report["phase"], metric, group, float(value)) for report in reports
            for metric, group, value in _figures(report) if value is not None]
    return DataFrame(rows, columns=["step", "phase", "metric", "group", "value"])


def clients(reports: list[Report]) -> "DataFrame":
    """The figures of every client in every step in which clients were judged; the last one always is such.

    Returns:
        Columns step, phase, metric, client, value (float, in [0, 1]). The metrics are owned (accuracy over the classes
        that the client owns), matched (over its own class mix), global (over all classes), miou, and local (on its own
        test images, where it has any). Clients that are
        not judged have no rows.
    """
    from pandas import DataFrame
    rows = [(report["step"], report["phase"], metric, client, float(value)) for report in reports
            for metric, values in (report.get("by_client") or {}).items()
            for client, value in enumerate(values) if value is not None]
    return DataFrame(rows, columns=["step", "phase", "metric", "client", "value"])


def _figures(report: Report) -> Iterator[tuple[str, str, Any]]:
    yield "accuracy", WHOLE, report["accuracy"]
    for group, value in (report["groups"] or {}).items():
        yield "accuracy", group, value
    for name in ("global_accuracy", "macro", "miou"):
        yield name, WHOLE, report.get(name)
    for name, spread in (report["clients"] or {}).items():
        for kind, value in spread.items():
            yield "client_miou" if name == "miou" else name, kind, value
    for call, traffic in report["traffic"].items():
        yield "bytes_up", call, traffic["up"]
        yield "bytes_down", call, traffic["down"]
    yield "seconds", "training", report["seconds"]
    yield "seconds", "evaluation", report["evaluation_seconds"]
    for stage, seconds in report.get("stages", {}).items():
        yield "stage_seconds", stage, seconds
    for name in ("participants", "lost", "retried", "rejected"):
        yield name, WHOLE, len(report[name])
    for name, value in report["figures"].items():
        for group, number in value.items() if isinstance(value, dict) else [("method", value)]:
            if isinstance(number, int | float):
                yield name, group, number
