"""Checks of what a method declares, and the exception that a failed check raises."""

from raylt.contract.case import Case
from raylt.hyper import in_range, range_of
from raylt.methods import METHODS


class Violation(AssertionError):
    """A method breaks its contract. The message describes how."""


def expect(condition: object, violation: str) -> None:
    """Raise `Violation` unless the condition holds."""
    if not condition:
        raise Violation(violation)


def has_a_name_and_a_paper(case: Case) -> None:
    """The method has a name and a paper."""
    method = type(case.method)
    expect(isinstance(getattr(method, "name", None), str) and method.name, "`name` is missing")
    expect(isinstance(getattr(method, "paper", None), str) and method.paper, "`paper` is missing: authors, venue, year")


def is_a_value(case: Case) -> None:
    """The method is frozen, rejects unknown fields and can be constructed from its defaults."""
    method = type(case.method)
    expect(
        method.model_config.get("frozen") and method.model_config.get("extra") == "forbid",
        "model_config was changed, but a method must be frozen and forbid unknown fields",
    )
    method()


def declares_its_fields(case: Case) -> None:
    """The method declares each field with hp(): a source, and a search range that contains the default."""
    for name, field in type(case.method).model_fields.items():
        try:
            searched = range_of(field)
        except (KeyError, TypeError):
            raise Violation(f"{name} is not declared by hp(default, range, source)") from None
        expect(
            in_range(field.default, searched), f"{name}: the default {field.default!r} is outside its range {searched}"
        )
        expect(field.description, f"{name}: hp() needs a source: its meaning, and its equation or section")


def names_stages_and_methods(case: Case) -> None:
    """`later` names stages and fields of the method, and `trains_as` names a method."""
    method = case.method
    stages = method.stages(case.config().federation.rounds)
    for stage, names in method.later.items():
        expect(stage in stages, f"`later` has no stage {stage!r}; the stages are {', '.join(stages)}")
        expect(not isinstance(names, str), f"`later` has a text for the stage {stage!r}, not a tuple of names")
        for name in names:
            expect(name in type(method).model_fields, f"`later` names {name!r}, which is not a field")
    for name in method.encoder_fields:
        expect(name in type(method).model_fields, f"`encoder_fields` names {name!r}, which is not a field")
    expect(
        method.trains_as is None or method.trains_as in METHODS, f"`trains_as` names no method: {method.trains_as!r}"
    )
