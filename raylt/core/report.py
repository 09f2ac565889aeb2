"""`Report`: what one step of a run came to."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Report:
    """One step of a run: a round, or what a method does after the last one.

    Attributes:
        step: 1..R for rounds, R + 1 for the finish.
        phase: "round" or "finish".
        seconds: of training and aggregation; `evaluation_seconds` apart.
        accuracy: of what is deployed, on the balanced test set; None when it was not due. For personal methods the
            mean over the clients' own models, and `global_accuracy` is the global model's. Where clients see the
            classes in their own ways, as they see them; `global_accuracy` then is still over the true ones.
        global_macro, global_miou: of the global model, over the true classes; None when it was not judged.
        macro, miou: means over the classes of accuracy and of intersection over union, of what `accuracy` is of.
        groups: accuracy over the many-, medium- and few-shot classes; None for a group without classes.
        clients: per-client figures ("owned", "matched", "global", "miou", and "local" where clients have test images of
            their own), each with its mean and worst decile.
        by_client: the same of each client by id, None for one that is not judged; kept of clients' own models, and
            of the last evaluation of all.
        others: of a personal method after its last step, the same figures of each of its `other_models`, by name.
        quality: after the last round, of the global model's probabilities: "auc" and "calibration_error", see
            `raylt.metrics.quality`.
        confusion: SHA-256 of the counts that all of this was read off, see raylt/core/confusions.py.
        traffic: bytes and replies by client function.
        participants: ids of the clients sampled for the round whose replies were used.
        lost, retried, rejected: client ids; rejected ones with the reason.
        figures: what the method reports.
        stages: seconds by stage: the waits for clients by client function, "aggregation", what the method times of
            its own ("synthesis"), "evaluation" and "checkpoint".
    """

    step: int
    phase: str
    seconds: float
    evaluation_seconds: float
    accuracy: float | None
    global_accuracy: float | None
    groups: dict[str, float | None] | None
    clients: dict[str, dict[str, float]] | None
    traffic: dict[str, dict[str, int]]
    participants: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    retried: list[int] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    by_client: dict[str, list[float | None]] | None = None
    stages: dict[str, float] = field(default_factory=dict)
    macro: float | None = None
    miou: float | None = None
    global_macro: float | None = None
    global_miou: float | None = None
    others: dict[str, dict[str, Any]] | None = None
    quality: dict[str, float | None] | None = None
    confusion: str | None = None
