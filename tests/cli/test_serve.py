"""The command `raylt serve`: refusals before the server starts."""

import pytest
from small_runs import make_tiny_run

from raylt.cli import serve


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: name)
    monkeypatch.delenv("RAYLT_SERVE_TOKEN", raising=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_other_machines_need_a_token(raylt, installed, host):
    ended = raylt("serve", "model.safetensors", "--host", host)
    assert ended.code == 2
    assert "[serve.unprotected]" in ended.err


def test_a_model_that_cannot_be_read_is_refused_before_ray_starts(raylt, installed, tmp_path):
    ended = raylt("serve", tmp_path / "model.safetensors")
    assert ended.code == 2
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    assert "[file.unreadable]" in ended.err
    assert raylt("serve", tmp_path / "model.safetensors").code == 2
    assert raylt("serve", tmp_path / "model.txt").code == 2
    assert "[file.not-found]" in raylt("serve", "no-such-run").err


def test_without_ray_serve_the_extra_is_named(raylt, monkeypatch, tmp_path):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    make_tiny_run(tmp_path, "fedavg", name="run")
    ended = raylt("serve", tmp_path / "run")
    assert ended.code == 2
    assert "[config.missing-package]" in ended.err
    assert "pip install '.[serve]'" in ended.err
