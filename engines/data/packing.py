"""JSON that gives back what it got: tuples stay tuples, keys stay numbers. Standard library only."""

from typing import Any

Json = Any


def pack(value: Any) -> Json:
    """Makes a value JSON-able: dict and tuple become one-key objects that ``unpack`` reads back."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [pack(item) for item in value]
        case tuple():
            return {"tuple": [pack(item) for item in value]}
        case dict():
            return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
        case set() | frozenset():
            return {"set": sorted((pack(item) for item in value), key=repr)}
        case _:
            raise TypeError(f"cannot keep a {type(value).__name__} as JSON")


def unpack(value: Json) -> Any:
    """The value that ``pack`` got."""
    match value:
        case {"tuple": items}:
            return tuple(unpack(item) for item in items)
        case {"dict": items}:
            return {unpack(key): unpack(item) for key, item in items}
        case {"set": items}:
            return {unpack(item) for item in items}
        case list():
            return [unpack(item) for item in value]
        case _:
            return value
