"""The application object for Ray Serve's own command line and configuration files.

    serve run raylt.serving:app model=runs/shops

The environment variable RAYLT_SERVE_TOKEN holds the token. `raylt serve` does the same, with more options.
"""

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

TOKEN = "RAYLT_SERVE_TOKEN"


class ServeArguments(BaseModel):
    """The arguments of the Ray Serve application.

    Attributes:
        model: Path of a run folder or of an exported file.
        rate: Maximum number of images per second from one address; None for no limit.
        replicas: Number of processes that hold the model.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str
    rate: float | None = Field(default=None, gt=0)
    replicas: int = Field(default=1, ge=1)


def app(arguments: ServeArguments) -> Any:
    """Return the Ray Serve application that serves a model."""
    from actors.serving import application
    from raylt.runs.serving.model import served_model
    from raylt.runs.serving.service import Limits

    limits = Limits(os.environ.get(TOKEN) or None, arguments.rate)
    return application(served_model(Path(arguments.model)), limits, arguments.replicas)
