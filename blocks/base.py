"""The base of every configuration model."""

from typing import Any

from pydantic import BaseModel, ConfigDict


def _say_defaults(schema: dict[str, Any]) -> None:
    """Moves each default into the description, and requires nothing.

    A form that is filled with defaults would override what the recipe inherits from its base; an empty field inherits.
    What is missing after inheritance is found by validation. A box to tick would send false where nobody touched it, so
    yes and no are two choices of which neither is made.
    """
    schema.pop("required", None)
    for field in schema.get("properties", {}).values():
        if "const" not in field and "default" in field:
            default = field.pop("default")
            if not isinstance(default, dict | list):
                field["description"] = f"{field.get('description', '')} Default: {default}.".strip()
        if field.get("type") == "boolean":
            del field["type"]
            field["enum"] = [True, False]


class Strict(BaseModel):
    """A configuration section: unknown settings are errors, values never change after validation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        json_schema_extra=_say_defaults,
        protected_namespaces=(),
    )
