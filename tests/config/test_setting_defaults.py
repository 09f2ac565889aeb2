"""Every default of every setting, against a second list of these values.

A changed default alters the results of all runs that leave the setting out, and fails no test that sets it.
"""

from pathlib import Path

import yaml

from raylt.config import Config

VALUES = yaml.safe_load(Path(__file__).with_name("defaults.yaml").read_text())


def test_defaults_are_those_of_the_list():
    tree = Config(method={"name": "fedavg"}).model_dump(mode="json")
    del tree["method"]
    assert tree == VALUES
