"""The checks of what a method says of itself, and how a check says what is wrong."""

from raylt.contract.case import Case
from raylt.hyper import in_range, range_of


class Broken(AssertionError):
    """What a method does that it may not."""


def expect(condition: object, said: str) -> None:
    """Raises `Broken` unless the condition holds."""
    if not condition:
        raise Broken(said)


def has_a_name_and_a_paper(case: Case) -> None:
    """names itself and its source"""
    method = type(case.method)
    expect(isinstance(getattr(method, "name", None), str) and method.name, "`name` is missing")
    expect(isinstance(getattr(method, "paper", None), str) and method.paper, "`paper` is missing: authors, venue, year")


def is_a_value(case: Case) -> None:
    """is frozen, refuses unknown fields and can be made from its defaults"""
    method = type(case.method)
    expect(method.model_config.get("frozen") and method.model_config.get("extra") == "forbid",
           "model_config was changed: a method is frozen and forbids unknown fields")
    method()


def declares_its_fields(case: Case) -> None:
    """declares each field by hp(), with a search range that holds its default and a source"""
    for name, field in type(case.method).model_fields.items():
        try:
            held = in_range(field.default, range_of(field))
        except (KeyError, TypeError):
            raise Broken(f"{name} is not declared by hp(default, range, source)") from None
        expect(held, f"{name}: the default {field.default!r} lies outside its range {range_of(field)}")
        expect(field.description, f"{name}: hp() needs a source: what it is, its equation or section")
