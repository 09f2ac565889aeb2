"""The command `raylt check` on a user's file."""

import json

import pytest

GOOD = """
from typing import ClassVar
import raylt
from torch.nn import functional as F

class Mine(raylt.Method):
    name: ClassVar[str] = "checked"
    paper: ClassVar[str] = "for tests"

    def objective(self, client, message):
        return lambda batch: F.cross_entropy(client.model(batch.x), batch.y)
"""


def test_a_typo_is_one_paragraph_that_names_the_users_line_and_ends_the_checks(raylt, tmp_path, no_guests):
    (tmp_path / "typo.py").write_text(GOOD.replace("cross_entropy", "cross_entropie"))
    code, out, _ = raylt("check", "typo.py")
    assert code == 1
    assert out.count("\n") == 1
    assert "AttributeError: module 'torch.nn.functional' has no attribute 'cross_entropie' (typo.py:11, in" in out
    assert "Later checks were not run." in out
    results = json.loads(raylt("check", "typo.py", "--format", "json").out)
    assert [result["fault"] is None for result in results] == [True] * (len(results) - 1) + [False]


@pytest.mark.slow
def test_a_method_that_another_process_sees_otherwise_is_found_out(raylt, tmp_path, no_guests):
    text = GOOD.replace("import raylt\n", "import raylt, os, sys\nHERE = 'pytest' in sys.modules\n")
    text = text.replace("batch.y)", "batch.y) * (1 if HERE else 2)")
    (tmp_path / "own.py").write_text(text)
    code, out, _ = raylt("check", "own.py")
    assert code == 1
    assert "can be sent to another process" in out
    assert "the bits differ in another process" in out


@pytest.mark.slow
def test_a_method_that_does_not_import_elsewhere_is_found_out(raylt, tmp_path, no_guests):
    text = GOOD.replace("import raylt\n", "import raylt, sys\nassert 'pytest' in sys.modules, 'only there'\n")
    (tmp_path / "own.py").write_text(text)
    code, out, _ = raylt("check", "own.py")
    assert code == 1
    assert "AssertionError: only there (own.py:4, in <module>)" in out
    assert out.count("\n") == 1


@pytest.mark.slow
def test_fields_that_change_nothing_are_a_notice(raylt, tmp_path, no_guests):
    own = (
        "    used: float = raylt.hp(1.0, raylt.Uniform(0.5, 2.0), 'weight of the loss')\n"
        "    rare: str = raylt.hp('a', raylt.Choice('a', 'b', 'c'), 'only c has an effect')\n"
        "    unread: float = raylt.hp(1.0, raylt.Uniform(0.5, 2.0), 'weight of nothing')\n\n    def objective"
    )
    text = GOOD.replace("    def objective", own).replace("F.cross", "(self.used + (self.rare == 'c')) * F.cross")
    (tmp_path / "own.py").write_text(text)
    code, _, err = raylt("check", "own.py")
    assert code == 0
    assert err.startswith("checked: other values of unread change nothing on the tiny task"), err


@pytest.mark.slow
def test_fields_of_raylts_own_methods_are_not_tried(raylt):
    code, _, err = raylt("check", "fedrela")  # its `after` acts only on larger tasks
    assert code == 0
    assert "change nothing" not in err


def test_a_method_s_name_after_its_file_is_answered_with_the_call_that_checks_it(raylt, tmp_path, no_guests):
    (tmp_path / "own.py").write_text(GOOD)
    code, _, err = raylt("check", "own.py", "checked")
    assert code == 2
    assert "[config.malformed]" in err
    assert "raylt check --plugin own.py checked" in err
