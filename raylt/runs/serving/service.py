"""`Service`: answers prediction requests with a model, independently of the server (such as Ray Serve).

    POST /predict?client=NAME   an image file as the body -> {"class": ..., "shares": {class: share}}
    GET /                       the page on which users drop images
    GET /clients                {"clients": [NAME, ...]}, empty if there is only one model
    GET /card                   the model card, in Markdown
    GET /health                 {"status": "ok", ...}

Errors are {"code": ..., "error": ...}, with the same code and message as on the command line. If the service has a
token, all but the page and /health require it, and the page asks its user for it.
"""

import asyncio
import hmac
import html
import io
import ipaddress
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from raylt.data.images.decoding import FORMATS, Undecodable
from raylt.errors import RayltError, describe_error, did_you_mean, shorten
from raylt.runs.export.load import load_image
from raylt.runs.serving.model import OpenedModel

MAX_BODY_BYTES = 10 * 2**20
MAX_PIXELS = 2**25  # a decoded image takes at least one byte per pixel
MAX_ADDRESSES = 10_000  # number of addresses whose rates are remembered
MAX_NAMED_CLIENTS = 20  # in an error's text
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src blob:; connect-src 'self'"
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Limits:
    """The limits that a service puts on requests.

    Args:
        token: Token that requests must contain; None if no token is required.
        rate: Maximum number of images per second from one address; None for no limit.
        most_bytes: Maximum size of an image file, in bytes.
        body_s: Time within which a request's body must arrive, in seconds.
        local: Whether to refuse requests that call this machine by another name than localhost or a loopback address.
            A web page whose name was made to lead to this machine (DNS rebinding) sends such requests.
    """

    token: str | None = None
    rate: float | None = None
    most_bytes: int = MAX_BODY_BYTES
    body_s: float = 30.0
    local: bool = False


@dataclass(frozen=True)
class Request:
    """An HTTP request to the service.

    Args:
        method: HTTP method, such as GET.
        path: Path in the URL.
        query: Parameters in the URL.
        headers: Headers by name in lower case.
        address: Address of the sender.
        body: Function that reads the body up to the given number of bytes, and one more byte if it is longer.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    address: str
    body: Callable[[int], Awaitable[bytes]]


@dataclass(frozen=True)
class Answer:
    """An HTTP answer to a request."""

    status: int
    body: bytes
    type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


# Maps a client and an image to the shares of the classes.
Predict = Callable[[str | None, np.ndarray], Awaitable[dict[str, float]]]


class Refused(RayltError):
    """The error for a refused request, with its HTTP status.

    Args:
        status: HTTP status.
    """

    def __init__(self, status: int, message: str, code: str, **details: Any):
        super().__init__(message, code=code, **details)
        self.status = status


class Service:
    """Answers HTTP requests with the predictions of a model.

    Args:
        predict: Function that computes the shares of classes. It may wait for other requests, to process several images
            together.
    """

    def __init__(self, model: OpenedModel, limits: Limits, predict: Predict, now: Callable[[], float] = time.monotonic):
        self._model = model
        self._limits = limits
        self._predict = predict
        self._now = now
        # number of allowed images and time of the last update, by address
        self._allowance: OrderedDict[str, tuple[float, float]] = OrderedDict()

    async def answer(self, request: Request) -> Answer:
        """Return the answer to a request; an error becomes an answer with the error's HTTP status."""
        try:
            return await self._route(request)
        except Refused as error:
            return _refusal(error.status, error.code, str(error))
        except RayltError as error:
            return _refusal(400, error.code, str(error))
        except Exception as error:
            return _refusal(500, "serve.failed", describe_error(error))

    async def _route(self, request: Request) -> Answer:
        routes = {"/": "GET", "/health": "GET", "/clients": "GET", "/card": "GET", "/predict": "POST"}
        verb = routes.get(request.path)
        if verb is None:
            raise Refused(
                404,
                f"path: unknown path ({shorten(request.path)}). Use one of {', '.join(routes)}.",
                "serve.no-such-path",
            )
        if request.method not in (verb, "HEAD" if verb == "GET" else verb):
            raise Refused(
                405,
                f"{request.path}: does not accept this method ({shorten(request.method)}). Send {verb}.",
                "serve.wrong-verb",
            )
        if request.path != "/health":
            self._check_host(request)
        if request.path == "/":
            return Answer(200, self._page.encode(), "text/html; charset=utf-8", HEADERS)
        if request.path == "/health":
            return _as_json(200, {"status": "ok", "model": self._model.served.name})
        self._check_token(request)
        if request.path == "/clients":
            return _as_json(200, {"clients": self._model.clients})
        if request.path == "/card":
            return Answer(200, self._model.served.card.encode(), "text/markdown; charset=utf-8", HEADERS)
        self._check_rate(request.address)
        client = self._client(request.query.get("client"))
        shares = await self._predict(client, await self._image(request))
        return _as_json(200, {"class": max(shares, key=shares.__getitem__), "shares": shares})

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host")  # only HTTP/1.0, which browsers do not send, may leave it out
        if self._limits.local and host is not None and not is_loopback(_without_port(host)):
            raise Refused(
                421,
                f"Host: is not the name of this machine ({shorten(host)}). Use 127.0.0.1, or start the service with a "
                "token.",
                "serve.foreign-host",
            )

    def _check_token(self, request: Request) -> None:
        token = self._limits.token
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        # servers decode headers as Latin-1
        if token is not None and not hmac.compare_digest(given.encode("latin-1", "replace"), token.encode()):
            raise Refused(
                401,
                "Authorization: the token is missing or wrong. Send Authorization: Bearer TOKEN.",
                "serve.token-refused",
            )

    def _check_rate(self, address: str) -> None:
        """Count an image against the rate limit of an address, and refuse the request above the limit.

        Bursts of one second's images are allowed.
        """
        rate = self._limits.rate
        if rate is None:
            return
        now = self._now()
        most = max(1.0, rate)
        left, since = self._allowance.pop(address, (most, now))
        left = min(most, left + (now - since) * rate)
        self._allowance[address] = (left - 1 if left >= 1 else left), now
        if len(self._allowance) > MAX_ADDRESSES:
            self._allowance.popitem(last=False)
        if left < 1:
            raise Refused(
                429, f"rate: more than {rate:g} images a second from one address. Send fewer.", "serve.too-many"
            )

    def _client(self, name: str | None) -> str | None:
        clients = self._model.clients
        if name is None and clients:
            raise Refused(
                400,
                f"client: each client has its own model, but none is named. Add ?client=NAME, one of "
                f"{_listed(clients)}.",
                "client.not-named",
            )
        if name is not None and name not in clients:
            choice = f"Give one of {_listed(clients)}" if clients else "Leave it out, since there is only one model"
            raise Refused(
                404,
                f"client: unknown client ({shorten(name)}). {did_you_mean(shorten(name), clients)}{choice}.",
                "client.unknown",
            )
        return name

    async def _image(self, request: Request) -> np.ndarray:
        if request.headers.get("content-type", "").lower().startswith("multipart/"):
            raise Refused(
                415,
                "Content-Type: forms (multipart) are not supported. Send the image file itself as the body.",
                "serve.wrong-type",
            )
        most = self._limits.most_bytes
        try:
            content = await asyncio.wait_for(request.body(most), self._limits.body_s)
        except TimeoutError:
            raise Refused(
                408,
                f"body: did not arrive in time ({self._limits.body_s:g} s). Send a smaller image.",
                "serve.too-slow",
            ) from None
        if len(content) > most:
            raise Refused(413, f"body: more than {most} bytes. Send a smaller image.", "serve.too-large", most=most)
        if not content:
            raise Refused(400, "body: is empty. Send an image file as the body.", "data.undecodable")
        _check_pixels(content)
        model = self._model.any
        try:
            # in a thread, since decoding a large image would block the service for half a second
            return await asyncio.to_thread(load_image, content, model.shape, model.fit, model.depth)
        except Undecodable as error:
            raise Refused(
                400, f"body: not an image that can be decoded ({error.cause}). Send another.", "data.undecodable"
            ) from None

    @property
    def _page(self) -> str:
        described = {
            "model": self._model.served.name,
            "token": self._limits.token is not None,
            "most": self._limits.most_bytes,
        }
        return (
            _template()
            .replace("{{title}}", html.escape(self._model.served.name))
            .replace("{{described}}", json.dumps(described).replace("<", "\\u003c"))
        )


@cache
def _template() -> str:
    return Path(__file__).with_name("page.html").read_text()


def _check_pixels(content: bytes) -> None:
    """Raise an error if an image has more than `MAX_PIXELS` pixels.

    Content that is not an image is left to the decoder.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            pixels = image.width * image.height
    except Image.DecompressionBombError:  # more than five times MAX_PIXELS
        pixels = None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        return
    if pixels is None or pixels > MAX_PIXELS:
        given = "" if pixels is None else f" ({pixels})"
        raise Refused(413, f"image: more than {MAX_PIXELS} pixels{given}. Send a smaller image.", "serve.too-large")


def is_loopback(host: str) -> bool:
    """Return whether a host name or address always means the machine on which it is used."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    """Return the name or address in a Host header: localhost:8000 -> localhost, [::1]:8000 -> ::1."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.removeprefix("[").removesuffix("]").lower()


def _refusal(status: int, code: str, message: str) -> Answer:
    return _as_json(status, {"code": code, "error": message})


def _as_json(status: int, tree: Any) -> Answer:
    headers = HEADERS | ({"WWW-Authenticate": "Bearer"} if status == 401 else {})
    return Answer(status, json.dumps(tree).encode(), headers=headers)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMED_CLIENTS]) + (" ..." if len(names) > MAX_NAMED_CLIENTS else "")
