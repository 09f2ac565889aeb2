"""A headless Chromium in which tests look at pages, over its debugging protocol."""

import asyncio
import base64
import itertools
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)
PATIENCE_S = 60


def _text_of(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


class Page:
    """A page in the browser."""

    def __init__(self, port_file: Path, size: tuple[int, int]):
        self._port_file = port_file
        self._size = size
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> "Page":
        deadline = time.monotonic() + PATIENCE_S
        # Chromium creates the file before it writes the port into it
        while not (written := _text_of(self._port_file)) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        port = written.split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.put(f"http://127.0.0.1:{port}/json/new") as answer:
            target = await answer.json()
        self._socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**27)
        width, height = self._size
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, command: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": command, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=PATIENCE_S)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    async def run(self, script: str) -> Any:
        """Return the value of a script, after its promises have settled."""
        result = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def wait_for(self, script: str) -> Any:
        """Wait until the value of a script is true; return the value."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := await self.run(script)):
            assert time.monotonic() < deadline, f"{script} has not become true"
            await asyncio.sleep(0.1)
        return value

    async def picture(self) -> bytes:
        """Return the page as a PNG."""
        return base64.b64decode((await self.send("Page.captureScreenshot", format="png"))["data"])


@contextmanager
def browser(folder: Path, size: tuple[int, int] = (900, 700)) -> Iterator[Page]:
    """Start a browser with its profile in a folder; end the browser after the block."""
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    folder.mkdir(exist_ok=True)
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--user-data-dir={folder}", "about:blank"], stdout=log, stderr=log)
    try:
        yield Page(folder / "DevToolsActivePort", size)
    finally:
        process.terminate()
        process.wait(10)
