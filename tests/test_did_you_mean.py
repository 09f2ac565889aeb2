"""Errors for mistyped names suggest the most similar name of the same kind."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from raylt.data.sources.folders import read_parts
from raylt.errors import ConfigError, did_you_mean
from raylt.models.torchvision_timm import library_model
from raylt.plots.objects import draw_run
from raylt.studies.analysis.claims import read_claim
from raylt.studies.analysis.measures import measure_of
from raylt.studies.definition import define

RUN = cast(Any, SimpleNamespace(finished=lambda: None))
STUDY = {"name": "names", "cells": {"digits": {"data.source": "digits"}}, "arms": {"sfd": "sfd", "fedavg": "fedavg"}}


@pytest.mark.parametrize(
    ("word", "choices", "answer"),
    [
        ("wien", ["Graz", "Wien"], "Did you mean Wien? "),
        ("WIEN", ["Graz", "Wien"], "Did you mean Wien? "),
        ("Wein", ["GRAZ", "WIEN"], "Did you mean WIEN? "),
        ("Paris", ["Graz", "Wien"], ""),
        ("Paris", [], ""),
        ("rl", ["lr", "epochs"], "Did you mean lr? "),
        ("lt", ["lr", "epochs"], "Did you mean lr? "),
        ("xy", ["lr", "epochs"], ""),
        ("99", ["9", "98", "client_99"], ""),
    ],
)
def test_the_most_similar_name_is_meant_in_either_case(word, choices, answer):
    assert did_you_mean(word, choices) == answer


def test_a_folder_of_test_images_named_in_another_way_is_answered_with_its_name(tmp_path):
    (tmp_path / "Validation").mkdir()
    with pytest.raises(ConfigError, match=r"Did you mean Validation\?"):
        read_parts(tmp_path, "validation")


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda: measure_of("acuracy"), "accuracy"),
        (lambda: read_claim("SFD > fedaug", ["sfd", "fedavg"], "few"), "sfd"),
        (lambda: draw_run(RUN, cast(Any, "Confusion"), None), "confusion"),
        (lambda: library_model("torchvision:ResNet-18", 10, (32, 32, 3), None), "torchvision:resnet18"),
        (lambda: define({**STUDY, "reference": "FedAvg"}), "fedavg"),
        (lambda: define({**STUDY, "only": {"digits": ["SFD"]}}), "sfd"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_one_that_is_like_it(call, answer):
    with pytest.raises(ConfigError, match=rf"Did you mean {answer}\?") as caught:
        call()
    assert caught.value.code == "config.unknown-name"
