"""A configuration section that is one of several kinds, and says so when a setting belongs to another of them."""

from typing import Any, ClassVar

from pydantic import model_validator

from headrace.blocks.base import Strict


class Choice(Strict):
    """Base of the variants of one discriminated union; every variant is a direct subclass of its family."""

    family: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _name_useless_settings(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kind = cls.model_fields["kind"].default
        useless = sorted(key for key in data if key not in cls.model_fields)
        if not useless:
            return data
        variants = cls.__mro__[1].__subclasses__()
        complaints = []
        for key in useless:
            owners = [v.model_fields["kind"].default for v in variants if key in v.model_fields]
            where = f"it belongs to {cls.family} {', '.join(owners)}" if owners else "no such setting exists"
            complaints.append(f"'{key}' has no effect with {cls.family} '{kind}': {where}")
        settings = ", ".join(f for f in cls.model_fields if f != "kind") or "none"
        raise ValueError("; ".join(complaints) + f" (settings of '{kind}': {settings})")
