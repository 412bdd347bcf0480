"""Checks Kubernetes objects against the models of the official Python client, in the environment that has it.

Reads JSON lists of objects from standard input, and prints a line for each field that the API does not have, has as
another type, or requires.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from kubernetes import client
from pydantic import ValidationError

PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}


def faults(value: Any, kind: str, at: str) -> Iterator[str]:
    """Yields what is wrong with a value of a kind: V1Pod, List[V1Container], Dict[str, str]."""
    if found := re.fullmatch(r"List\[(.+)\]", kind):
        if not isinstance(value, list):
            yield f"{at}: not a list"
            return
        for number, each in enumerate(value):
            yield from faults(each, found[1], f"{at}[{number}]")
    elif found := re.fullmatch(r"Dict\[str, (.+)\]", kind):
        for name, each in value.items():
            yield from faults(each, found[1], f"{at}.{name}")
    elif kind in PLAIN:
        if not isinstance(value, PLAIN[kind]) or (kind == "int" and isinstance(value, bool)):
            yield f"{at}: {value!r} is not {kind}"
    elif kind not in ("IntOrString", "datetime"):
        yield from of_model(value, getattr(client, kind), at)


def of_model(value: Any, model: Any, at: str) -> Iterator[str]:
    """Yields what is wrong with an object of a model."""
    if not isinstance(value, dict):
        yield f"{at}: not a mapping"
        return
    names = {written: own for own, written in model.attribute_map.items()}
    for name, each in value.items():
        if name not in names:
            yield f"{at}.{name}: {model.__name__} has no such field"
        else:
            yield from faults(each, model.openapi_types[names[name]], f"{at}.{name}")


def missing(value: Any, model: Any, at: str) -> Iterator[str]:
    """Yields the required fields that an object of a model lacks, at any depth."""
    try:
        model.model_validate(value)
    except ValidationError as error:
        yield from (f"{at}: {each['loc']} is required" for each in error.errors() if each["type"] == "missing")


def model_of(one: dict[str, Any]) -> Any:
    version = one["apiVersion"].rpartition("/")[2]
    return getattr(client, f"{version.capitalize()}{one['kind']}")


if __name__ == "__main__":
    for one in json.load(sys.stdin):
        model, where = model_of(one), f"{one['kind']} {one['metadata']['name']}"
        for fault in (*of_model(one, model, where), *missing(one, model, where)):
            print(fault)
