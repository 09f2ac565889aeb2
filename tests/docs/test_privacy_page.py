"""The page on privacy: the methods that it names."""

import re
from pathlib import Path

import raylt
from raylt.methods import METHODS
from raylt.models import build_model

PAGE = Path(raylt.__path__[0]).parent / "docs" / "privacy.md"


def test_it_names_the_methods_whose_updates_can_have_noise():
    model = build_model("small", 4, (8, 8, 1))
    paragraph = PAGE.read_text().partition("With their default fields these do:")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", paragraph)
    methods = {name: kind() for name, kind in METHODS.items()}
    assert sorted(named) == sorted(
        name
        for name, method in methods.items()
        if not method.uploads_more and method.shared(model) and "data.auxiliary" not in (method.privileged or "")
    )
