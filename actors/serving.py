"""Serving of a model over HTTP with Ray Serve: replicas that batch images, and the application for `serve run`."""

import asyncio
import logging
import socket

import numpy as np
import ray
import torch
from ray import serve
from starlette.requests import Request as HttpRequest  # pyright: ignore[reportMissingImports]
from starlette.responses import Response  # pyright: ignore[reportMissingImports]

from actors.by_value import pack
from raylt.errors import ConfigError
from raylt.own_code.shipment import Shipment
from raylt.registry import Plugin, adopt, plugins
from raylt.runs.serving.model import ServedModel
from raylt.runs.serving.service import Limits, Request, Service

MAX_BATCH = 32  # Images per forward pass.
BATCH_WAIT_S = 0.005  # Time that an image waits for others.
MAX_QUEUE = 256  # Requests that wait for a replica; further requests are answered with 503.
CONTROLLER = "SERVE_CONTROLLER_ACTOR"  # Name of Ray Serve's actor; a cluster has one.
HEAD = "node:__internal_head__"  # Resource that only the head of a cluster has.


@serve.deployment(max_ongoing_requests=64, max_queued_requests=MAX_QUEUE)
class ModelReplica:
    """Replica that loads the models of a file or run folder and answers prediction requests."""

    def __init__(self, shipped: Shipment, limits: Limits):
        torch.set_num_threads(1)
        served, own_code = shipped.open()
        adopt(own_code)
        self._opened = served.open()
        self._service = Service(self._opened, limits, self._predict)

    async def __call__(self, request: HttpRequest) -> Response:
        """Answer one HTTP request."""
        answer = await self._service.answer(
            Request(
                request.method,
                request.url.path,
                request.query_params,
                request.headers,
                request.client.host if request.client else "",
                lambda most: _body(request, most),
            )
        )
        return Response(answer.body, answer.status, answer.headers, answer.type)

    async def _predict(self, client: str | None, image: np.ndarray) -> dict[str, float]:
        return await self._predict_together((client, image))

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=BATCH_WAIT_S)
    async def _predict_together(self, items: list[tuple[str | None, np.ndarray]]) -> list[dict[str, float]]:
        """Return the class probabilities of several images, with one forward pass per model."""
        return await asyncio.to_thread(self._shares, items)

    def _shares(self, items: list[tuple[str | None, np.ndarray]]) -> list[dict[str, float]]:
        shares: list[dict[str, float]] = [{}] * len(items)
        for client in {client for client, _ in items}:
            places = [place for place, item in enumerate(items) if item[0] == client]
            images = np.stack([items[place][1] for place in places])
            for place, share in zip(places, self._opened.models[client].predict(images).shares, strict=True):
                shares[place] = share
        return shares


def application(served: ServedModel, limits: Limits, replicas: int) -> serve.Application:
    """Return the Ray Serve application for a model, for `serve.run`.

    Args:
        served: The model.
        limits: Token and limits of the service.
        replicas: Number of processes that hold the model.
    """
    own_code: tuple[Plugin, ...] = tuple(plugins())
    return ModelReplica.options(num_replicas=replicas).bind(pack((served, own_code)), limits)


def check_address(host: str, port: int) -> None:
    """Check that a service can start in this process's Ray session, with the cluster's head listening for requests.

    Ray Serve does not check this: it shares its port with other processes, and a running instance keeps its address.

    Raises:
        ConfigError: The cluster already runs Ray Serve, or its head cannot listen at the address.
    """
    try:
        ray.get_actor(CONTROLLER, namespace="serve")
    except ValueError:
        pass
    else:
        raise ConfigError(
            f"--address: the cluster already runs Ray Serve, whose address cannot be changed ({host}:{port}). End it "
            "with serve shutdown, or add the model to it with serve run raylt.serving:app.",
            code="serve.already-running",
            key="--address",
        )
    cause = ray.get(ray.remote(num_cpus=0, resources={HEAD: 0.001})(why_not).remote(host, port))
    if cause is not None:
        raise ConfigError(
            f"--port: the service cannot listen at {host}:{port} ({cause}). Give another --port or --host.",
            code="serve.no-address",
            key="--port",
            value=port,
            host=host,
        )


def why_not(host: str, port: int) -> str | None:
    """Return the reason why this machine cannot listen at an address; None if it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier service may have used the port
            listener.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None


def start(application: serve.Application, host: str, port: int) -> None:
    """Deploy an application in this process's Ray session, and wait until it answers requests."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
    serve.run(application, name="raylt", route_prefix="/")


def stop() -> None:
    """Stop the application and its replicas."""
    serve.shutdown()


async def _body(request: HttpRequest, most: int) -> bytes:
    """Read up to `most` + 1 bytes of a request body. The extra byte shows that the body is too long."""
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > most:
            return bytes(parts[: most + 1])
    return bytes(parts)
