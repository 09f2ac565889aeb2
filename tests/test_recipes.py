import re
from pathlib import Path

import pytest

import raylt
from raylt.config import load
from raylt.methods import make_method
from raylt.models import MODELS

FOLDER = Path(raylt.__path__[0]) / "recipes"
RECIPES = sorted(FOLDER.rglob("*.yaml"))
NAMES = [str(path.relative_to(FOLDER)) for path in RECIPES]


def test_every_cell_of_sfds_tables_1_and_4_has_a_recipe():
    assert sum(name.startswith("sfd/") for name in NAMES) == 16      # 10 cells in Table 1, 8 in Table 4, 2 in both


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_recipe_loads_and_its_method_builds(path):
    config = load(path)
    make_method(config.method)
    assert config.model in MODELS


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_header_gives_command_figure_and_time_and_its_commands_load(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    cells = [match for line in header if (match := re.match(r"#   (\S+) +(\d+\.\d\d)   raylt run (\S+) ?(.*)$", line))]
    assert cells
    assert any(line.startswith("# Time: ") for line in header)
    for cell in cells:
        method, figure, file, overrides = cell.groups()
        assert file == f"raylt/recipes/{path.relative_to(FOLDER)}"
        assert 0 < float(figure) < 100
        assert make_method(load(path, overrides.split()).method).name == method.lower()
