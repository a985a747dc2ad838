"""Check the types of a dataclass whose values were read from a JSON file."""

from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def check_field_types(instance: Any) -> None:
    """Raise TypeError if a field of a dataclass, or of one inside it, has the wrong type."""
    hints = get_type_hints(type(instance))
    for one in fields(instance):
        value = getattr(instance, one.name)
        if not _has_type(value, hints[one.name]):
            raise TypeError(f"{one.name} has the type {type(value).__name__}")


def _has_type(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_has_type(value, argument) for argument in arguments)
    if origin is Literal:
        return any(value == argument and type(value) is type(argument) for argument in arguments)
    if origin is list:
        return type(value) is list and all(_has_type(item, arguments[0]) for item in value)
    if origin is tuple:  # of any length
        return type(value) is tuple and all(_has_type(item, arguments[0]) for item in value)
    if origin is dict:
        return type(value) is dict and all(_has_type(v, arguments[1]) for v in value.values())
    if hint is int:
        return type(value) is int and abs(value) < 1 << 63
    if hint is float:  # JSON from other programs may have 1 for 1.0
        return type(value) is float or (type(value) is int and abs(value) < 1 << 1000)
    if is_dataclass(hint):
        if type(value) is hint:
            check_field_types(value)
        return type(value) is hint
    return type(value) is (NoneType if hint is None else hint)
