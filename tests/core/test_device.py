"""A process's device, decided from the settings and the lease. No GPU is needed."""

import os

import pytest
import tiny
import torch
from refusals import refused

from raylt.core import device
from raylt.core.device import describe, open_device
from raylt.core.fleet.fleet import compute
from raylt.core.training import cuda_graphs
from raylt.errors import ConfigError

BACKENDS = torch.backends


def config(precision="float32", **resources):
    return tiny.configure(local={"precision": precision}, resources=resources)


@pytest.fixture(autouse=True)
def flags_kept(monkeypatch):
    """Restore torch's flags after each test."""
    matmul, tf32 = torch.get_float32_matmul_precision(), BACKENDS.cudnn.allow_tf32
    operators = [(kind, kind.fp32_precision) for kind in (BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)]
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(matmul)
    BACKENDS.cudnn.allow_tf32, BACKENDS.cudnn.deterministic = tf32, False
    for kind, before in operators:
        kind.fp32_precision = before


@pytest.fixture
def a_gpu(monkeypatch):
    """Let torch report a GPU, and put tensors for it on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Pretence")
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None: zeros(*size))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("resources", "leased", "expected"),
    [
        ({}, None, "cuda"),
        ({}, True, "cuda"),
        ({"device": "cuda"}, None, "cuda"),
        ({"device": "cuda"}, True, "cuda"),
        ({}, False, "cpu"),  # the process sees a GPU that is leased to another one
        ({"device": "cpu"}, None, "cpu"),
        ({"device": "cpu"}, True, "cpu"),
        ({"gpus_per_client": 0}, None, "cpu"),
        ({"gpus_per_client": 0}, True, "cpu"),
        ({"device": "cpu", "gpus_per_client": 0.5}, True, "cpu"),
        ({"gpus_per_client": 0.5}, True, "cuda"),
    ],
)
def test_setting_and_lease_decide_where_there_is_a_gpu(a_gpu, resources, leased, expected):
    assert open_device(config(**resources), leased).type == expected


@pytest.mark.parametrize(
    ("resources", "leased"), [({}, None), ({}, False), ({"device": "cpu"}, True), ({"gpus_per_client": 0}, True)]
)
def test_without_a_gpu_it_is_the_cpu_where_none_was_leased_or_asked_for(no_gpu, resources, leased):
    assert open_device(config(**resources), leased).type == "cpu"


@pytest.mark.parametrize(
    ("resources", "leased", "code", "details"),
    [
        ({}, True, "device.unusable", {"value": "auto", "driver": "570.86.10", "cuda": "13.9"}),
        ({"device": "cuda"}, None, "device.unusable", {"value": "cuda", "driver": "570.86.10", "cuda": "13.9"}),
        ({"device": "cuda"}, False, "device.not-leased", {"value": "cuda"}),
    ],
)
def test_a_gpu_that_is_leased_or_asked_for_and_is_missing_is_refused(
    no_gpu, monkeypatch, tmp_path, resources, leased, code, details
):
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Thu Jan  9 2025\nGCC version: 12\n")
    monkeypatch.setattr(device, "_DRIVER", version)
    monkeypatch.setattr(torch.version, "cuda", "13.9")
    with refused(code, ConfigError, key="resources.device", **details) as caught:
        open_device(config(**resources), leased)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("leased", [None, True])
def test_a_gpu_without_kernels_in_the_wheel_is_refused_with_driver_and_wheel(a_gpu, monkeypatch, tmp_path, leased):
    def zeros(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore lines")

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(device, "_DRIVER", tmp_path / "none")
    monkeypatch.setattr(torch.version, "cuda", None)
    with refused("device.unusable", ConfigError, driver=None, cuda=None) as caught:
        open_device(config(), leased)
    assert "no kernel image" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gpus_per_client_0_and_a_gpu_contradict_each_other():
    with pytest.raises(ValueError, match=r"excludes every GPU, but resources\.device=cuda asks for one"):
        config(device="cuda", gpus_per_client=0)


@pytest.mark.parametrize(
    ("precision", "deterministic"), [("float32", False), ("tf32", True), ("bfloat16", False), ("float32", True)]
)
def test_torch_is_set_to_what_is_asked_for_whatever_it_was_before(a_gpu, precision, deterministic):
    torch.set_float32_matmul_precision("medium")
    BACKENDS.cudnn.allow_tf32 = BACKENDS.cudnn.benchmark = True
    BACKENDS.cudnn.deterministic = not deterministic
    open_device(config(precision, deterministic=deterministic))
    expected = "tf32" if precision == "tf32" else "ieee"
    assert torch.get_float32_matmul_precision() == {"tf32": "high", "ieee": "highest"}[expected]
    assert BACKENDS.cuda.matmul.allow_tf32 == BACKENDS.cudnn.allow_tf32 == (precision == "tf32")
    assert BACKENDS.cudnn.conv.fp32_precision == BACKENDS.cudnn.rnn.fp32_precision == expected
    assert (BACKENDS.cudnn.deterministic, BACKENDS.cudnn.benchmark) == (deterministic, False)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert device.os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)


def test_a_run_after_a_deterministic_one_is_not_slowed_by_it(a_gpu):
    open_device(config("tf32", deterministic=True))
    open_device(config())
    assert not torch.are_deterministic_algorithms_enabled()
    assert not BACKENDS.cudnn.deterministic
    assert not BACKENDS.cudnn.allow_tf32


def test_a_cpu_computes_in_float32_without_the_algorithms_of_gpus():
    open_device(config("tf32", device="cpu", deterministic=True))
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_is_computed_on_is_described(a_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(device, "_DRIVER", tmp_path / "none")
    on_cpu, on_gpu = describe(torch.device("cpu")), describe(torch.device("cuda"))
    assert (on_cpu["device"], on_cpu["driver"], on_cpu["cuda"]) == ("cpu", None, None)
    assert on_gpu["device"] == "NVIDIA Pretence"
    assert on_cpu["torch"] == on_gpu["torch"] == torch.__version__
    assert on_cpu["cpu"] == on_gpu["cpu"] != ""


def test_work_of_map_is_done_on_the_device_that_is_handed_over():
    seen = []
    compute(lambda item: seen.append(item["x"].device.type) or {}, {"x": torch.ones(2)}, 1, torch.device("meta"))
    assert seen == ["meta"]


def test_work_of_map_has_as_many_threads_as_it_is_given_and_returns_values_alone():
    def count(item):
        return {"threads": torch.get_num_threads(), "x": torch.nn.Parameter(item["x"])}

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        result = compute(count, {"x": torch.ones(2)}, 1, torch.device("cpu"))
        assert (result["threads"], torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(before)
    assert not result["x"].requires_grad


@pytest.mark.parametrize(("setting", "recorded"), [("auto", True), ("off", False)])
def test_steps_on_a_gpu_are_recorded_unless_that_is_switched_off(a_gpu, monkeypatch, setting, recorded):
    monkeypatch.setattr(cuda_graphs, "_RECORDERS", {"cuda": cuda_graphs.CudaRecorder()})  # left by an earlier run
    open_device(config(graphs=setting))
    assert ("cuda" in cuda_graphs._RECORDERS) == recorded
    open_device(config(device="cpu"))
    assert "cpu" not in cuda_graphs._RECORDERS


def test_mps_is_seen_by_the_daemon_that_lives_in_its_folder_of_pipes(a_gpu, monkeypatch, tmp_path):
    gpu, pid = torch.device("cuda"), tmp_path / "nvidia-cuda-mps-control.pid"
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert describe(gpu)["mps"] is None  # the folder has no daemon's files
    (tmp_path / "control").touch()
    assert describe(gpu)["mps"] is None  # a stale file of a daemon that has ended
    pid.write_text("4194305")  # larger than any process id
    assert describe(gpu)["mps"] is None
    pid.write_text(str(os.getpid()))
    assert describe(gpu)["mps"] == "running"
    assert describe(torch.device("cpu"))["mps"] is None
    (tmp_path / "control").unlink()
    assert describe(gpu)["mps"] is None
