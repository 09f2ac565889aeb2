"""Ray metrics of a run, which Prometheus reads and the dashboard docs/grafana.json shows.

All metrics carry the tag `run`. Accuracy has the tag `group`, seconds have `client` or server `stage`, progress has
`stage`, and bytes have `direction` and `call`.
"""

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge

from raylt.core.report import RoundReport


class RunMetrics:
    """The Ray metrics of one run. Call `show` after every step, and `show_progress` within a step."""

    def __init__(self, run: str):
        self._run = run
        self._round = self._gauge("round", "Number of committed steps.")
        self._accuracy = self._gauge("accuracy", "Accuracy of the deployed model: all, many, medium or few.", "group")
        self._seconds = self._gauge(
            "server_seconds",
            "Duration of the last step by stage, such as waits for clients, aggregation, evaluation and checkpoint.",
            "stage",
        )
        self._client = self._gauge("client_seconds", "Duration of a client's calls in the last step.", "client")
        self._figure = self._gauge("figure", "Values that the method reports for the last step.", "figure")
        self._progress = self._gauge("progress", "Finished share of the current stage, such as train.", "stage")
        self._stage = ""
        self._bytes = self._counter("bytes", "Bytes sent to (down) and by (up) clients.", "direction", "call")
        self._troubles = self._counter("troubles", "Calls retried, clients lost and replies rejected.", "kind")

    def show(self, report: RoundReport, client_seconds: Mapping[int, float]) -> None:
        """Set the metrics to the values of one step.

        Args:
            report: Report of the step.
            client_seconds: Duration of each client's calls, by id.
        """
        self._round.set(report.step)
        if report.accuracy is not None:
            self._accuracy.set(report.accuracy, _tags(group="all"))
        for group, value in (report.groups or {}).items():
            if value is not None:
                self._accuracy.set(value, _tags(group=group))
        for stage, seconds in report.timings.items():
            self._seconds.set(seconds, _tags(stage=stage))
        for id, seconds in client_seconds.items():
            self._client.set(seconds, _tags(client=str(id)))
        for name, value in report.figures.items():
            if isinstance(value, int | float):
                self._figure.set(float(value), _tags(figure=name))
        for call, traffic in report.traffic.items():
            for direction in ("down", "up"):
                if traffic[direction]:
                    self._bytes.inc(traffic[direction], _tags(direction=direction, call=call))
        for kind, clients in (("retried", report.retried), ("lost", report.lost), ("rejected", report.rejected)):
            if clients:
                self._troubles.inc(len(clients), _tags(kind=kind))

    def show_progress(self, stage: str, done: float, total: int) -> None:
        """Set the finished share of the current stage, and reset the share of the previous stage to 0."""
        if self._stage and stage != self._stage:
            self._progress.set(0.0, _tags(stage=self._stage))
        self._stage = stage
        self._progress.set(done / total if total else 0.0, _tags(stage=stage))

    def _gauge(self, name: str, description: str, *tags: str) -> Gauge:
        gauge = Gauge(f"raylt_{name}", description, tag_keys=("run", *tags))
        gauge.set_default_tags(_tags(run=self._run))
        return gauge

    def _counter(self, name: str, description: str, *tags: str) -> Counter:
        counter = Counter(f"raylt_{name}", description, tag_keys=("run", *tags))
        counter.set_default_tags(_tags(run=self._run))
        return counter


def _tags(**texts: str) -> dict[str, str]:
    """Return the tags of a value. Ray accepts ASCII alone, so other letters are escaped, for example as \\xe4."""
    return {name: text.encode("ascii", "backslashreplace").decode() for name, text in texts.items()}
