"""A model behind Ray Serve gives the same answers as in this process, over several connections, with `raylt serve`."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from small_runs import make_tiny_run, picture

from raylt.runs.export.export import export
from raylt.runs.export.load import load_image, load_model

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytestmark = pytest.mark.slow

PATIENCE_S = 200


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def ask(port, path, method="GET", body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_the_command_serves_a_file_to_several_connections_and_ends_with_a_signal(tmp_path):
    run = make_tiny_run(tmp_path, "fedper")
    file = export(run, tmp_path / "shops.safetensors")
    port = free_port()
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "raylt", "serve", str(file), "--port", str(port)],
        cwd=tmp_path,
        env=os.environ | {"RAYLT_SERVE_TOKEN": "secret", "RAY_AUTH_MODE": "disabled"},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while f"127.0.0.1:{port}" not in (tmp_path / "log").read_text():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert ask(port, "/health")[0] == 200
        # Ray Serve would share the port with the first service
        second = subprocess.run(
            [sys.executable, "-m", "raylt", "serve", str(file), "--port", str(port)],
            cwd=tmp_path,
            env=os.environ | {"RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert (second.returncode, second.stdout) == (2, "")
        assert "[serve.no-address]" in second.stderr
        assert ask(port, "/")[1].startswith(b"<!doctype html>")
        assert b"graz" in ask(port, "/card", Authorization="Bearer secret")[1]
        assert ask(port, "/predict?client=graz", "POST", picture())[0] == 401
        status, content = ask(port, "/predict?client=graz", "POST", b"no image", Authorization="Bearer secret")
        assert (status, json.loads(content)["code"]) == (400, "data.undecodable")

        names = [name for _, name in zip(range(2), _clients(file), strict=False)]
        images = [picture(colour=number) for number in range(8)]

        def predict(number):
            path = f"/predict?client={names[number % 2]}"
            return ask(port, path, "POST", images[number % 8], Authorization="Bearer secret")

        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(predict, range(32)))
        assert {status for status, _ in answers} == {200}
        for number, (_, content) in enumerate(answers):
            model = load_model(file, names[number % 2])
            pixels = load_image(images[number % 8], model.shape, model.fit, model.depth)
            [expected] = model.predict(pixels[None]).shares
            shares = json.loads(content)["shares"]
            # the last bits depend on which images share a batch
            assert shares.keys() == expected.keys()
            np.testing.assert_allclose(list(shares.values()), list(expected.values()), atol=1e-6)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        log.close()
    assert code == 0, (tmp_path / "log").read_text()


@pytest.mark.parametrize("host", ["203.0.113.9", "no.such.example"])
def test_an_address_of_another_machine_cannot_be_listened_at(host):
    from actors.serving import why_not

    assert why_not(host, free_port())
    assert why_not("127.0.0.1", free_port()) is None


def test_the_command_of_ray_serve_starts_the_same_application(tmp_path):
    file = export(make_tiny_run(tmp_path, "fedavg"), tmp_path / "model.safetensors")
    port = free_port()
    application = {
        "name": "shops",
        "route_prefix": "/",
        "import_path": "raylt.serving:app",
        "args": {"model": file.name},
    }
    options = {"host": "127.0.0.1", "port": port}  # `serve run raylt.serving:app` itself always takes port 8000
    (tmp_path / "serve.yaml").write_text(json.dumps({"http_options": options, "applications": [application]}))
    variables = {"RAYLT_SERVE_TOKEN": "secret", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "serve.yaml"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _healthy(port):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert ask(port, "/predict", "POST", picture())[0] == 401
        status, content = ask(port, "/predict", "POST", picture(), Authorization="Bearer secret")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    model = load_model(file)
    [expected] = model.predict(load_image(picture(), model.shape, model.fit, model.depth)[None]).shares
    assert status == 200
    shares = json.loads(content)["shares"]
    assert shares.keys() == expected.keys()
    np.testing.assert_allclose(list(shares.values()), list(expected.values()), atol=1e-6)


def _healthy(port):
    try:
        return ask(port, "/health")[0] == 200
    except OSError:
        return False


def test_ray_serve_builds_the_application_from_its_own_arguments(tmp_path):
    from pydantic import ValidationError
    from ray.serve import Application
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as build

    from raylt.serving import app

    file = export(make_tiny_run(tmp_path, "fedavg"), tmp_path / "model.safetensors")
    assert isinstance(build(app, {"model": str(file), "rate": "20", "replicas": "2"}), Application)
    with pytest.raises(ValidationError):
        build(app, {"model": str(file), "rat": "20"})


def _clients(file):
    from raylt.runs.serving.model import served_model

    return served_model(file).open().clients
