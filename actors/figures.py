"""A run's figures as Ray metrics, which Prometheus reads and docs/grafana.json draws.

All carry the tag `run`; accuracy by `group`, seconds by `client` or by server `stage`, bytes by `direction` and `call`.
"""

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge

from raylt.core.report import Report


class Figures:
    """The metrics of one run; `show` after every step."""

    def __init__(self, run: str):
        self._run = run
        self._round = self._gauge("round", "steps committed")
        self._accuracy = self._gauge("accuracy", "of what is deployed: all, or many, medium, few", "group")
        self._seconds = self._gauge("server_seconds", "of the last step by stage: waits for clients, aggregation, "
                                    "synthesis, evaluation, checkpoint and so on", "stage")
        self._client = self._gauge("client_seconds", "of a client's calls in the last step", "client")
        self._figure = self._gauge("figure", "what the method reports of the last step", "figure")
        self._bytes = self._counter("bytes", "sent to (down) and by (up) clients", "direction", "call")
        self._troubles = self._counter("troubles", "calls retried, clients lost, replies rejected", "kind")

    def show(self, report: Report, client_seconds: Mapping[int, float]) -> None:
        """Records one step."""
        self._round.set(report.step)
        if report.accuracy is not None:
            self._accuracy.set(report.accuracy, {"group": "all"})
        for group, value in (report.groups or {}).items():
            if value is not None:
                self._accuracy.set(value, {"group": group})
        for stage, seconds in report.stages.items():
            self._seconds.set(seconds, {"stage": stage})
        for id, seconds in client_seconds.items():
            self._client.set(seconds, {"client": str(id)})
        for name, value in report.figures.items():
            if isinstance(value, int | float):
                self._figure.set(float(value), {"figure": name})
        for call, traffic in report.traffic.items():
            for direction in ("down", "up"):
                if traffic[direction]:
                    self._bytes.inc(traffic[direction], {"direction": direction, "call": call})
        for kind, clients in (("retried", report.retried), ("lost", report.lost), ("rejected", report.rejected)):
            if clients:
                self._troubles.inc(len(clients), {"kind": kind})

    def _gauge(self, name: str, what: str, *tags: str) -> Gauge:
        gauge = Gauge(f"raylt_{name}", what, tag_keys=("run", *tags))
        gauge.set_default_tags({"run": self._run})
        return gauge

    def _counter(self, name: str, what: str, *tags: str) -> Counter:
        counter = Counter(f"raylt_{name}", what, tag_keys=("run", *tags))
        counter.set_default_tags({"run": self._run})
        return counter
