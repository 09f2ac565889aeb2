"""The command `raylt serve`."""

import os
import threading
from importlib.util import find_spec
from typing import Annotated

import typer

from raylt.cli.models import RunOrFile
from raylt.cli.options import Address, err, out
from raylt.errors import ConfigError
from raylt.own_code.top_level_names import claim
from raylt.serving import TOKEN

PACKAGES = ("starlette", "uvicorn", "fastapi")  # packages of ray[serve]


def serve(
    model: RunOrFile,
    host: Annotated[
        str, typer.Option(help="Address to listen on; addresses that other machines can reach need a token.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Maximum images per second from one address; by default no limit.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Number of processes that serve the model.")] = 1,
    address: Address = None,
) -> None:
    """Serve a model over HTTP with Ray Serve: a page to drop images on, and POST /predict.

    If the environment variable RAYLT_SERVE_TOKEN is set, requests must contain this token.
    """
    token = os.environ.get(TOKEN) or None
    _check(host, token)
    claim()
    from actors.cluster.session import session
    from raylt.runs.serving.model import served_model
    from raylt.runs.serving.service import Limits

    served = served_model(model)  # raises errors here instead of in a replica's log
    with session(address):
        from actors.serving import application, check_address, start, stop

        check_address(host, port)
        try:
            start(application(served, Limits(token, rate, local=token is None), replicas), host, port)
            shown = f"[{host}]" if ":" in host else host
            out.print(f"{served.name} at http://{shown}:{port}/{', with a token' if token else ''}", soft_wrap=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            err.print("stopped")
        finally:
            stop()


def _check(host: str, token: str | None) -> None:
    """Raise ConfigError if Ray Serve is missing, or if other machines could use the service without a token."""
    from raylt.runs.serving.service import is_loopback

    missing = next((name for name in PACKAGES if find_spec(name) is None), None)
    if missing is not None:
        raise ConfigError(
            f"raylt serve: {missing} is not installed. Run pip install '.[serve]' in the clone.",
            code="config.missing-package",
            package=missing,
        )
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host: others could use the service without a token ({host}). Set {TOKEN}, or listen on 127.0.0.1.",
            code="serve.unprotected",
            key="--host",
            value=host,
        )
