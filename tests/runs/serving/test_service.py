"""Requests to a model's service and their answers, without a server."""

import asyncio
import json
import re

import numpy as np
import pytest
from PIL import Image
from small_runs import make_tiny_run, picture

from raylt.runs.export.export import export
from raylt.runs.export.load import load_images, load_model
from raylt.runs.serving import service as serving
from raylt.runs.serving.model import served_model
from raylt.runs.serving.service import Limits, Request, Service


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Export one model, and a model for each client; return both files."""
    folder = tmp_path_factory.mktemp("served")
    return {
        method: export(make_tiny_run(folder, method), folder / f"{method}.safetensors")
        for method in ("fedavg", "fedper")
    }


class Asker:
    """Sends requests to a service, and counts the calls of its model."""

    def __init__(self, file, limits):
        self.opened = served_model(file).open()
        self.clock = 0.0
        self.service = Service(self.opened, limits, self.predict, lambda: self.clock)

    async def predict(self, client, pixels):
        return self.opened.models[client].predict(pixels[None]).shares[0]

    def __call__(self, path, method="GET", body=b"", query=None, headers=None, address="1.2.3.4"):
        async def read(most):
            return body[: most + 1]

        request = Request(method, path, query or {}, headers or {}, address, read)
        return asyncio.run(self.service.answer(request))

    def post(self, body, **more):
        return self("/predict", "POST", body, **more)


@pytest.fixture
def ask(files):
    return Asker(files["fedavg"], Limits())


def code_of(answer):
    assert answer.type == "application/json"
    tree = json.loads(answer.body)
    assert "\n" not in tree["error"]
    return answer.status, tree["code"]


def test_an_image_is_answered_as_raylt_predict_does(files, ask, tmp_path):
    file = tmp_path / "image.png"
    file.write_bytes(picture())
    answer = ask.post(picture())
    model = load_model(files["fedavg"])
    [expected] = model.predict(load_images([file], model.shape, model.fit)).shares
    assert answer.status == 200
    assert json.loads(answer.body) == {"class": max(expected, key=expected.__getitem__), "shares": expected}


def test_an_image_is_fitted_as_the_images_of_the_training_were(ask, tmp_path):
    file = tmp_path / "wide.png"
    Image.fromarray(np.arange(72, dtype=np.uint8).reshape(6, 12) * 3).save(file)
    model = ask.opened.any
    answers = []
    for model.fit in ("crop", "pad"):
        answers.append(json.loads(ask.post(file.read_bytes()).body)["shares"])
        assert answers[-1] == model.predict(load_images([file], model.shape, model.fit)).shares[0]
    assert answers[0] != answers[1]


def test_each_client_has_its_own_model(files, tmp_path):
    ask = Asker(files["fedper"], Limits())
    names = ask.opened.clients
    assert len(names) > 1
    answers = [json.loads(ask.post(picture(), query={"client": name}).body) for name in names]
    file = tmp_path / "image.png"
    file.write_bytes(picture())
    for name, answer in zip(names, answers, strict=True):
        model = load_model(files["fedper"], name)
        assert answer["shares"] == model.predict(load_images([file], model.shape, model.fit)).shares[0]
    assert code_of(ask.post(picture())) == (400, "client.not-named")
    refusal = ask.post(picture(), query={"client": f"{names[-1]}x"})
    assert code_of(refusal) == (404, "client.unknown")
    assert f"Did you mean {names[-1]}?" in json.loads(refusal.body)["error"]


def test_the_model_of_one_client_is_served_like_a_common_one(files, tmp_path):
    file = export(files["fedper"].parent / "fedper", tmp_path / "one.safetensors", client="1")
    ask = Asker(file, Limits())
    assert ask.opened.clients == []
    assert ask.post(picture()).status == 200


def test_a_client_of_a_common_model_is_unknown(ask):
    assert code_of(ask.post(picture(), query={"client": "0"})) == (404, "client.unknown")


@pytest.mark.parametrize("body", [b"", b"no image", picture()[:60]])
def test_what_is_no_image_is_refused(ask, body):
    assert code_of(ask.post(body)) == (400, "data.undecodable")


def test_an_image_of_too_many_bytes_or_pixels_is_refused(files, monkeypatch):
    ask = Asker(files["fedavg"], Limits(most_bytes=500))
    assert code_of(ask.post(picture(100))) == (413, "serve.too-large")
    assert ask.post(picture(8)).status == 200
    assert Asker(files["fedavg"], Limits(most_bytes=len(picture()))).post(picture()).status == 200
    assert Asker(files["fedavg"], Limits(most_bytes=len(picture()) - 1)).post(picture()).status == 413
    monkeypatch.setattr(serving, "MAX_PIXELS", 99)
    assert ask.post(picture(9)).status == 200
    assert code_of(ask.post(picture(10))) == (413, "serve.too-large")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 49)  # above twice as many pixels Pillow raises an error
    assert code_of(ask.post(picture(10))) == (413, "serve.too-large")


def test_the_page_can_be_asked_for_by_its_head(ask):
    assert [ask(path, "HEAD").status for path in ("/", "/health", "/card")] == [200] * 3
    assert code_of(ask("/predict", "HEAD")) == (405, "serve.wrong-verb")


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "Multipart/Form-Data; boundary=x"])
def test_a_form_is_refused_with_what_to_send(ask, kind):
    answer = ask.post(picture(), headers={"content-type": kind})
    assert code_of(answer) == (415, "serve.wrong-type")


@pytest.mark.parametrize(
    ("path", "method", "expected"),
    [
        ("/nothing", "GET", (404, "serve.no-such-path")),
        ("/predict", "GET", (405, "serve.wrong-verb")),
        ("/card", "POST", (405, "serve.wrong-verb")),
    ],
)
def test_other_paths_and_verbs_are_refused(ask, path, method, expected):
    assert code_of(ask(path, method)) == expected


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer other", "Basic secret", "Bearer sécret"])
def test_a_request_without_the_token_is_refused(files, given):
    ask = Asker(files["fedavg"], Limits(token="secret"))
    assert code_of(ask.post(picture(), headers={"authorization": given})) == (401, "serve.token-refused")
    assert code_of(ask("/card", headers={"authorization": given})) == (401, "serve.token-refused")
    assert code_of(ask("/clients", headers={"authorization": given})) == (401, "serve.token-refused")
    assert ask("/health").status == ask("/").status == 200
    assert ask.post(picture(), headers={"authorization": "Bearer secret"}).status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("shops.example:8000", 421),
        ("127.0.0.1.shops.example", 421),
        ("192.0.2.7", 421),
        ("", 421),
    ],
)
def test_a_local_service_answers_to_the_names_of_this_machine_only(files, host, status):
    ask = Asker(files["fedavg"], Limits(local=True))
    headers = {"host": host}
    assert ask.post(picture(), headers=headers).status == status
    assert ask("/card", headers=headers).status == ask("/", headers=headers).status == status
    assert ask("/health", headers=headers).status == ask.post(picture()).status == 200
    assert Asker(files["fedavg"], Limits()).post(picture(), headers=headers).status == 200
    if status == 421:
        assert code_of(ask("/card", headers=headers)) == (421, "serve.foreign-host")


def test_an_address_may_send_a_limited_number_of_images_a_second(files):
    ask = Asker(files["fedavg"], Limits(rate=2))
    assert [ask.post(picture()).status for _ in range(3)] == [200, 200, 429]
    assert ask.post(picture(), address="5.6.7.8").status == 200
    ask.clock = 0.5
    assert [ask.post(picture()).status for _ in range(2)] == [200, 429]
    assert code_of(ask.post(picture())) == (429, "serve.too-many")


def test_a_rate_saves_up_no_images_and_counts_no_refused_ones(files):
    ask = Asker(files["fedavg"], Limits(rate=2))
    assert ask.post(picture()).status == 200
    ask.clock = 100.0
    assert [ask.post(picture()).status for _ in range(3)] == [200, 200, 429]
    ask = Asker(files["fedavg"], Limits(rate=0.5))
    statuses = []
    for ask.clock in (0.0, 1.0, 2.0, 3.0):
        statuses.append(ask.post(picture()).status)
    assert statuses == [200, 429, 200, 429]


def test_the_address_whose_request_is_longest_ago_is_forgotten_first(files, monkeypatch):
    monkeypatch.setattr(serving, "MAX_ADDRESSES", 2)
    ask = Asker(files["fedavg"], Limits(rate=1))
    assert [ask.post(picture(), address=address).status for address in "abac"] == [200, 200, 429, 200]
    assert [ask.post(picture(), address=address).status for address in "acb"] == [429, 429, 200]


def test_an_unforeseen_error_is_one_line(files, monkeypatch):
    ask = Asker(files["fedavg"], Limits())

    async def fail(client, pixels):
        raise ValueError("something\nelse")

    ask.service._predict = fail
    assert code_of(ask.post(picture())) == (500, "serve.failed")


def test_the_card_is_that_of_the_export(files, ask):
    assert ask("/card").body == files["fedavg"].with_name("fedavg.safetensors.md").read_bytes()
    assert ask("/health").status == 200


def test_the_page_loads_nothing_and_names_cannot_break_out_of_it(files, tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    file = folder / "a<script>&.safetensors"
    file.write_bytes(files["fedper"].read_bytes())
    answer = Asker(file, Limits(token="secret"))("/")
    page = answer.body.decode()
    assert answer.type.startswith("text/html")
    assert "a<script>" not in page
    assert "secret" not in page
    assert '"token": true' in page
    assert not re.search(r"(src|href)=\"?(https?:)?//", page)
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


@pytest.mark.parametrize("limits", [Limits(), Limits(token="secret")])
def test_names_of_clients_are_in_no_answer_without_the_token(files, limits):
    ask = Asker(files["fedper"], limits)
    names = ask.opened.clients
    assert names
    answers = [ask(path).body.decode() for path in ("/", "/health", "/clients", "/card", "/other")]
    shown = [name for name in names for body in answers if f'"{name}"' in body]
    assert sorted(shown) == ([] if limits.token else sorted(names))
    answer = ask("/clients", headers={"authorization": "Bearer secret"})
    assert json.loads(answer.body) == {"clients": names}


def test_a_common_model_has_no_clients_to_choose_from(ask):
    assert json.loads(ask("/clients").body) == {"clients": []}


def test_a_body_that_does_not_arrive_is_not_waited_for(files):
    ask = Asker(files["fedavg"], Limits(body_s=0.05))

    async def never(most):
        await asyncio.sleep(2)
        return b""

    request = Request("POST", "/predict", {}, {}, "1.2.3.4", never)
    assert code_of(asyncio.run(ask.service.answer(request))) == (408, "serve.too-slow")
    assert ask.post(picture()).status == 200


def test_what_a_request_says_is_shown_shortened(files):
    ask = Asker(files["fedper"], Limits(token="secret"))
    authorised = {"authorization": "Bearer secret"}
    for answer in (
        ask("/" + "x" * 100_000),
        ask("/card", "x" * 100_000),
        ask.post(picture(), query={"client": "x" * 100_000}, headers=authorised),
    ):
        assert 400 <= answer.status < 500
        assert len(answer.body) < 1000


def test_a_token_may_have_letters_beyond_ascii(files):
    ask = Asker(files["fedavg"], Limits(token="geheim-ö"))
    for given, status in (("geheim-ö", 200), ("geheim-o", 401), ("\ud800", 401)):
        # clients send UTF-8, which a server reads as Latin-1
        header = f"Bearer {given}".encode("utf-8", "surrogatepass").decode("latin-1")
        assert ask.post(picture(), headers={"authorization": header}).status == status
    assert ask.post(picture(), headers={"authorization": "Bearer \ud800"}).status == 401
