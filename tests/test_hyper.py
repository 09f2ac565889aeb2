import math

import pytest
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import PydanticKnownError
from refusals import refused

from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, check_ends, hp, in_range, not_too_large, range_of
from raylt.methods import METHODS


class Example(BaseModel, frozen=True):
    mu: float = hp(0.01, LogUniform(1e-4, 1.0), "weight of the proximal term, Eq. 2", ge=0)
    kind: str = hp("a", Choice("a", "b"), "which of two, Section 3")
    plain: int = Field(3, description="not a hyper-parameter")


FIELDS = Example.model_fields


def test_hp_declares_default_source_and_range_at_once():
    assert Example().mu == 0.01
    assert FIELDS["mu"].description == "weight of the proximal term, Eq. 2"
    assert range_of(FIELDS["mu"]) == LogUniform(1e-4, 1.0)
    assert range_of(FIELDS["kind"]) == Choice("a", "b")


def test_hp_passes_checks_to_pydantic():
    assert Example(mu=0).mu == 0
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        Example(mu=-1e-9)


def test_a_field_that_hp_did_not_declare_has_no_range():
    with pytest.raises(KeyError):
        range_of(FIELDS["plain"])


@pytest.mark.parametrize("range", [Uniform(0.5, 2.0), LogUniform(0.5, 2.0)])
@pytest.mark.parametrize(
    ("value", "inside"),
    [
        (0.5, True),
        (1, True),
        (2.0, True),
        (0.49, False),
        (2.01, False),
        (-1.0, False),
        (math.nan, False),
        (math.inf, False),
    ],
)
def test_interval_holds_its_ends_and_nothing_outside(range, value, inside):
    assert in_range(value, range) is inside


def test_infinity_is_in_no_interval():
    assert not in_range(math.inf, Uniform(0, math.inf))


@pytest.mark.parametrize(("value", "inside"), [(0.1, True), ("b", True), (None, True), (0.2, False), ("c", False)])
def test_choice_holds_its_values_only(value, inside):
    assert in_range(value, Choice(0.1, "b", None)) is inside


def test_ranges_read_well():
    assert [str(r) for r in (Choice(0.1, 1, "auto"), Uniform(0, 1), LogUniform(1e-4, 1.0))] == [
        "{0.1, 1, auto}",
        "[0, 1]",
        "[0.0001, 1] log",
    ]


def test_ranges_are_values():
    assert len({Choice(1, 2), Choice(1, 2), Choice(2, 1), Uniform(0, 1), Uniform(0.0, 1.0), LogUniform(1, 2)}) == 4


@pytest.mark.parametrize(("method", "field"), [(m, f) for m, method in METHODS.items() for f in method.model_fields])
def test_default_of_every_hyper_parameter_can_be_drawn_by_a_search(method, field):
    declared = METHODS[method].model_fields[field]
    assert in_range(declared.default, range_of(declared))
    assert declared.description


@pytest.mark.parametrize("value", [1e30, -1e30, 2**53, -(2**53), "1e31", None])
def test_numbers_up_to_the_largest_magnitude_and_other_values_are_taken(value):
    assert not_too_large(value) == value


@pytest.mark.parametrize("value", [1.1e30, -1.1e30, 2**53 + 1, -(2**53) - 1])
def test_larger_numbers_of_either_sign_are_refused(value):
    with pytest.raises(PydanticKnownError):
        not_too_large(value)


def test_the_ends_of_an_interval_may_be_equal_and_not_reversed():
    check_ends("least", 1.0, "most", 1.0)
    with refused("config.out-of-range", ConfigError, key="method.least", value=1.5):
        check_ends("least", 1.5, "most", 1.0)
