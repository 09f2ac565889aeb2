"""What the files of a search hold, as JSON."""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from raylt.typed import closed

Kind = Literal["round", "proxy", "rehearsal", "final"]
Metric = Literal["accuracy", "many", "medium", "few", "owned", "matched", "miou"]
Searcher = Literal["tpe", "random", "grid"]
Scheduler = Literal["asha", "none"]
Share = Annotated[float, Field(ge=0, le=1)]


@closed
class JudgedPoint(TypedDict):
    """A point as JSON."""

    step: Annotated[int, Field(ge=1)]
    kind: Kind
    score: Share
    steps: Annotated[int, Field(ge=0)]
    validation: dict[str, Share | None]
    test: dict[str, Share | None]


@closed
class Ended(TypedDict):
    """A line of trials.jsonl: a trial that ended."""

    trial: str
    values: dict[str, Any]
    failed: str | None
    points: list[JudgedPoint]


@closed
class Asked(TypedDict):
    """The content of search.json."""

    base: dict[str, Any]
    spaces: dict[str, dict[str, Any]]
    samples: Annotated[int, Field(ge=1)] | None
    budget: Annotated[int, Field(ge=1)] | None
    searcher: Searcher
    scheduler: Scheduler
    grace: int | None
    metric: Metric
    seed: int
    lag: Annotated[int, Field(ge=0)]
    retries: Annotated[int, Field(ge=0)]
    sha256: str


POINT, ENDED, PLAN = TypeAdapter(JudgedPoint), TypeAdapter(Ended), TypeAdapter(Asked)
