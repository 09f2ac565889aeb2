from pathlib import Path

import pytest
from refusals import refused

from raylt.data.images.image_files import plain_name
from raylt.errors import DataError


@pytest.mark.parametrize(("encoding", "remedy"), [("utf-8", "Rename it."), ("ascii", "Set PYTHONUTF8=1, ")])
def test_a_name_that_the_locale_cannot_read_is_refused_with_what_helps(monkeypatch, encoding, remedy):
    monkeypatch.setattr("raylt.data.images.image_files.sys.getfilesystemencoding", lambda: encoding)
    with refused("data.bad-name", DataError) as caught:
        plain_name(Path("shops"), "na\udcc3\udcafve")
    assert remedy in str(caught.value)
