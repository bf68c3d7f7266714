"""The base of every configuration model."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A configuration section: unknown settings are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
