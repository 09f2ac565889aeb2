"""A service reads only the file that its user named, with the checks for foreign files."""

import os

import pytest
from refusals import refused

from raylt.errors import CheckpointError, ConfigError
from raylt.runs.serving.model import served_model


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    with refused("file.not-plain", CheckpointError, path=str(pipe)):
        served_model(pipe)


@pytest.mark.parametrize(
    ("name", "code", "kind"),
    [
        ("model.txt", "export.unknown-format", ConfigError),
        ("model.safetensors", "export.malformed", CheckpointError),
    ],
)
def test_an_error_names_the_users_file_and_no_copy_of_it(tmp_path, name, code, kind):
    file = tmp_path / name
    file.write_bytes(b"no model")
    with refused(code, kind) as caught:
        served_model(file)
    assert str(caught.value).startswith(str(file))
