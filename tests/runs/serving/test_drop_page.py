"""The page of a service in a real browser: the user drops an image, and its classes appear."""

import asyncio
import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import pytest
from small_runs import make_tiny_run, picture

from raylt.runs.export.export import export
from raylt.runs.serving.model import served_model
from raylt.runs.serving.service import Limits, Request, Service

browser = pytest.importorskip("browser", reason="the browser is driven with aiohttp")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(browser.BROWSER is None, reason="no browser is installed")]


def serve(opened, limits):
    """Start a server of Python's standard library that asks a `Service`; yield it."""

    async def predict(client, pixels):
        return opened.models[client].predict(pixels[None]).shares[0]

    service = Service(opened, limits, predict)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))

            async def read(most):
                return content[: most + 1]

            url = urlsplit(self.path)
            headers = {key.lower(): value for key, value in self.headers.items()}
            request = Request(self.command, url.path, dict(parse_qsl(url.query)), headers, "127.0.0.1", read)
            answer = asyncio.run(service.answer(request))
            self.send_response(answer.status)
            for key, value in {**answer.headers, "Content-Type": answer.type}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(answer.body)

        do_POST = do_GET

        def log_message(self, format, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


DROP = """(() => {
  const bytes = Uint8Array.from(atob(%r), letter => letter.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], %r, {type: "image/png"}));
  document.getElementById("drop").dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
})()"""


def drop(content, name):
    return DROP % (base64.b64encode(content).decode(), name)


def test_a_dropped_image_gets_its_classes_and_a_wrong_one_its_error(tmp_path):
    file = export(make_tiny_run(tmp_path, "fedper"), tmp_path / "shops.safetensors")
    opened = served_model(file).open()
    server = serve(opened, Limits(token="secret"))

    async def visit(page):
        async with page:
            await page.send("Page.navigate", url=f"http://127.0.0.1:{server.server_address[1]}/")
            await page.wait_for("document.getElementById('tokens')?.hidden === false")
            await page.run(drop(picture(), "without token.png"))
            refused = await page.wait_for("document.querySelector('.error')?.textContent")
            before = await page.run("document.getElementById('client').length")
            await page.run("document.getElementById('token').value = 'secret'")
            await page.run("document.getElementById('token').dispatchEvent(new Event('change'))")
            await page.wait_for("document.getElementById('client').length")
            names = await page.run("[...document.getElementById('client').options].map(o => o.value)")
            await page.run(f"document.getElementById('client').value = {json.dumps(opened.clients[1])}")
            await page.run(drop(picture(), "photo.png"))
            title = await page.wait_for("document.querySelector('dl')?.parentNode.querySelector('h2').textContent")
            shares = await page.run("[...document.querySelectorAll('dl dd.share')].map(e => e.textContent)")
            await page.run(drop(b"no image", "notes.png"))
            await page.wait_for("document.querySelectorAll('.error').length == 2")
            wrong = await page.run("document.querySelector('.error').textContent")
            return before, names, refused, title, shares, wrong, await page.picture()

    try:
        with browser.browser(tmp_path / "profile") as page:
            before, names, refused, title, shares, wrong, screenshot = asyncio.run(visit(page))
    finally:
        server.shutdown()
    assert before == 0
    assert names == opened.clients
    assert "Authorization" in refused
    [expected] = opened.models[opened.clients[1]].predict(_decoded(opened)).shares
    best = sorted(expected.values(), reverse=True)
    assert title == f"photo.png: {max(expected, key=expected.__getitem__)}"
    assert shares == [f"{100 * share:.1f} %" for share in best[:5]]
    assert "not an image" in wrong
    (tmp_path / "page.png").write_bytes(screenshot)


def test_a_page_without_a_token_lists_the_clients_at_once(tmp_path):
    file = export(make_tiny_run(tmp_path, "fedper"), tmp_path / "shops.safetensors")
    opened = served_model(file).open()
    server = serve(opened, Limits())

    async def visit(page):
        async with page:
            await page.send("Page.navigate", url=f"http://127.0.0.1:{server.server_address[1]}/")
            await page.wait_for("document.getElementById('client')?.length")
            return await page.run("[...document.getElementById('client').options].map(o => o.value)")

    try:
        with browser.browser(tmp_path / "profile") as page:
            names = asyncio.run(visit(page))
    finally:
        server.shutdown()
    assert names == opened.clients


def _decoded(opened):
    from raylt.runs.export.load import load_image

    return load_image(picture(), opened.any.shape, opened.any.fit, opened.any.depth)[None]
