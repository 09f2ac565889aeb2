"""`Section`: what a part of the configuration is, and `setting`, what a field of it says of itself."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from raylt.config.typed import as_typed

MOST = 10**7                # of anything that is counted; what is beyond is a slip, and would be found out by memory
LAST_SEED = 2**63 - 1


def setting(default: Any, what: str, takes: str | None = None, **checks: Any) -> Any:
    """A field that says what it means, for `raylt settings`, and what it takes where its type does not say so."""
    return Field(default=default, description=what, json_schema_extra=None if takes is None else {"takes": takes},
                 **checks)


class Section(BaseModel):
    """A part of the configuration: immutable, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_typed(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        return as_typed(cls.model_fields[info.field_name].annotation, value)
