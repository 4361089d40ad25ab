"""What the sections of a recipe share: strict models, the numbers they hold, and unions told apart by `type`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]


class Section(BaseModel):
    """Base of all sections: strict types, no unknown keys, no change after loading. Docstrings become descriptions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def kind(default: str) -> Discriminator:
    """Tell the members of a union apart by `type`, and take `default` where it is missing."""

    def tag(value: Any) -> Any:
        return value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)

    return Discriminator(tag)
