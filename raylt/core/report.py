"""`RoundReport`: the record of one committed step, with names for all its figures.

The fields of this model define everything that displays or stores a figure: the line of metrics.jsonl and its JSON
schema, the figures that summary.json repeats, the rows of `Run.metrics`, the curves of TensorBoard, and the headings of
a study's tables. One more field adds a figure that is computed from a confusion matrix:

    f1: Annotated[Share, Figure("mean F1 of the classes", "accuracy/mean F1", pooled=mean_f1)] = None

Here `mean_f1` is a function of a confusion matrix. Lines of earlier runs have None for the new figure.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from raylt import metrics
from raylt.typed_json import closed

if TYPE_CHECKING:
    from torch import Tensor

EVALUATION, CHECKPOINT = "evaluation", "checkpoint"  # stages of a step that are not of its method
FRESH = "fresh"  # name of clients' own models after one more round, among the other models of the report
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Fraction | None  # None if nothing was evaluated
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
ReportDict = dict[str, Any]  # a `RoundReport` as JSON


def _client_id(key: object) -> object:
    """Convert a client id to a number, since JSON stores it as a string."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


ClientId = Annotated[int, BeforeValidator(_client_id)]


@dataclass(frozen=True)
class Figure:
    """The meaning of a field of `RoundReport`, and where it is displayed.

    Attributes:
        title: Heading in tables and description in the JSON schema.
        curve: Tag of the TensorBoard curve; for a field with several values, the family of their curves.
        curves: Tags of single values of such a field, by key.
        pooled: Function that computes the figure from the confusion matrix int64 [C, C] of the deployed model, or from
            the sum of the matrices of the clients' own models.
        shared: The same for the confusion matrix of the global model, over the true classes.
        unit: "seconds" or "bytes"; empty for fractions and numbers.
    """

    title: str
    curve: str = ""
    curves: Mapping[str, str] = field(default_factory=dict)
    pooled: "Callable[[Tensor], float] | None" = None
    shared: "Callable[[Tensor], float] | None" = None
    unit: str = ""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        unit = {"unit": self.unit} if self.unit else {}
        return {**handler(schema), "description": self.title, **unit}


@closed
class Spread(TypedDict):
    """A figure over clients: its mean, and the mean of the worst tenth."""

    mean: Share
    worst_decile: Share


@closed
class TrafficRecord(TypedDict):
    """Bytes `down` in messages and `up` in replies of one client function, and the number of replies.

    The message counts once for each client whose answer the server waited for, even if the client did not answer.
    Rejected replies count. Messages that are sent again after a client's failure do not. A secure sum adds its keys and
    shares. Replies with noise count as they are sent, with all classes.
    """

    down: Count
    up: Count
    replies: Count


class RoundReport(BaseModel):
    """One committed step of a run: a round, or the work of `Method.finish` after the last round.

    The order of the fields is their order in metrics.jsonl. Fields with the default None are the figures of an
    evaluation; None means that nothing was evaluated after this step. Accuracies are in [0, 1].
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    step: Annotated[int, Field(ge=1), Figure("number of the step: 1..R for rounds, R + 1 for the finish")]
    phase: Annotated[Literal["round", "finish"], Figure("round, or finish for what follows the last round")]
    seconds: Annotated[
        Seconds, Figure("seconds of training and aggregation, without evaluation", "seconds/training", unit="seconds")
    ]
    evaluation_seconds: Annotated[Seconds, Figure("seconds of evaluation", "seconds/evaluation", unit="seconds")]
    # For personal methods, computed from the pooled counts of the clients' own models. If clients merge classes, these
    # are the classes as clients see them; figures of the global model always use the true classes.
    accuracy: Annotated[
        Share, Figure("accuracy on the balanced test set", "accuracy/test set", pooled=metrics.accuracy)
    ] = None
    global_accuracy: Annotated[
        Share, Figure("accuracy of the global model", "accuracy/global model", shared=metrics.accuracy)
    ] = None
    groups: Annotated[
        dict[str, Share] | None,
        Figure(
            "accuracy over the many-, medium- and few-shot classes; null for a group without test samples",
            "groups",
            {group: f"accuracy/{group}-shot" for group in metrics.GROUPS},
        ),
    ] = None
    clients: Annotated[
        dict[str, Spread] | None,
        Figure(
            "per-client figures by kind (owned, matched, long_tailed, global, miou, local), over the clients", "clients"
        ),
    ] = None
    traffic: Annotated[
        dict[str, TrafficRecord], Figure("bytes and replies by client function", "traffic", unit="bytes")
    ]
    participants: Annotated[
        list[Count], Figure("ids of the clients sampled for the round whose replies were used")
    ] = []
    lost: Annotated[list[Count], Figure("ids of the clients that gave no usable answer")] = []
    retried: Annotated[list[Count], Figure("ids of the clients that were called again")] = []
    rejected: Annotated[dict[ClientId, str], Figure("reason for each rejected reply, by client id")] = {}
    figures: Annotated[
        dict[str, Any], Figure("figures that the method reports", "method", {"loss": "training/loss"})
    ] = {}
    by_client: Annotated[
        dict[str, list[Share]] | None,
        Figure(
            "the per-client figures of each client, by id; null for a client that is not evaluated. Kept for the last "
            "evaluation, and for every evaluation of at most 10,000 clients' own models"
        ),
    ] = None
    timings: Annotated[
        dict[str, Seconds],
        Field(alias="stages"),
        Figure(
            "seconds by stage: the waits for clients by client function, aggregation, stages that the method times "
            "itself, evaluation and checkpoint",
            "seconds of stages",
            unit="seconds",
        ),
    ] = {}
    macro: Annotated[
        Share, Figure("mean of the class accuracies", "accuracy/mean of classes", pooled=metrics.macro)
    ] = None
    miou: Annotated[Share, Figure("mean intersection over union", "iou/test set", pooled=metrics.mean_iou)] = None
    global_macro: Annotated[
        Share,
        Figure(
            "mean of the global model's class accuracies",
            "accuracy/global model, mean of classes",
            shared=metrics.macro,
        ),
    ] = None
    global_miou: Annotated[
        Share, Figure("mean intersection over union of the global model", "iou/global model", shared=metrics.mean_iou)
    ] = None
    others: Annotated[
        dict[str, dict[str, Any]] | None,
        Figure(
            "after the last step of a personal method, the same figures of each of its other models", "other models"
        ),
    ] = None
    quality: Annotated[
        dict[str, Share] | None,
        Figure(
            "after the last round, quality of the global model's probabilities: auc, the mean over the classes of the "
            "area under the ROC curve, and calibration_error over 15 bins",
            "quality",
            {"auc": "quality/AUC", "calibration_error": "quality/calibration error"},
        ),
    ] = None
    answers: Annotated[
        str | None,
        Figure(
            "after the last round of a classification, the test images that the global model classifies correctly: "
            "bits in the order of the test set, written by `raylt.metrics.packed`"
        ),
    ] = None
    confusion: Annotated[
        Sha256 | None, Figure("SHA-256 of the counts of this evaluation, which confusions/STEP.npz keeps")
    ] = None

    shown: Annotated[
        Literal["accuracy", "local", "matched"] | None,
        Figure(
            "the main figure: accuracy; for clients' own models local, the mean over the clients on their own test "
            "images, or without such images matched, the mean on their own class mix"
        ),
    ] = None

    def record(self) -> dict[str, Any]:
        """Return the fields in the order and under the names of metrics.jsonl."""
        return self.model_dump(by_alias=True)


def shown_figure(line: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return the name and value of the main figure, for displays that have room for one figure.

    Args:
        line: A line of metrics.jsonl; the value is None if nothing was evaluated.
    """
    name = line.get("shown") or "accuracy"
    return name, line["accuracy"] if name == "accuracy" else line["clients"][name]["mean"]


def best_validated(lines: Iterable[Mapping[str, Any]], steps: Container[int]) -> dict[str, Any] | None:
    """Return the step, among some steps, with the highest accuracy on validation images, and that accuracy.

    The first step wins a tie. The result is None if no line of these steps has such an accuracy.
    """
    judged = [
        {"step": line["step"], "accuracy": line["figures"]["validation"]["accuracy"]}
        for line in lines
        if line["step"] in steps and line["figures"].get("validation", {}).get("accuracy") is not None
    ]
    return max(judged, key=lambda each: each["accuracy"], default=None)


def _figures() -> Iterator[tuple[str, Figure]]:
    for name, info in RoundReport.model_fields.items():
        for note in info.metadata:
            if isinstance(note, Figure):
                yield info.alias or name, note


FIGURES: dict[str, Figure] = dict(_figures())  # figures by key in metrics.jsonl
POOLED = {name: figure.pooled for name, figure in FIGURES.items() if figure.pooled is not None}
SHARED = {name: figure.shared for name, figure in FIGURES.items() if figure.shared is not None}
SHARES = tuple(name for name in FIGURES if name in POOLED or name in SHARED)
JUDGED = tuple(name for name, info in RoundReport.model_fields.items() if info.default is None)
