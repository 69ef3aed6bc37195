"""What the schemas of Kubernetes, KubeRay and the operator of Prometheus say of a document."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate

from tests.ops.manifests import SCHEMAS, Doc

CUSTOM = ("ray.io", "monitoring.coreos.com")
VERSIONS = ("1.31", "1.34")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")


@functools.cache
def _custom(group: str, version: str, kind: str) -> Any:
    path = SCHEMAS / group / f"{kind.lower()}_{version}.json"
    return jsonschema.Draft7Validator(json.loads(path.read_text()))


def custom(doc: Doc) -> bool:
    """Whether its kind is not one of Kubernetes itself."""
    return doc["apiVersion"].partition("/")[0] in CUSTOM


def faults(doc: Doc) -> list[str]:
    """What is wrong with it; empty for nothing, and for custom kinds where there are no schemas of them."""
    found = list(_quantities(doc, ""))
    group, _, version = doc["apiVersion"].rpartition("/")
    if custom(doc):
        if SCHEMAS.is_dir():
            validator = _custom(group, version, doc["kind"])
            found += [
                f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(doc)
            ]
        return found
    for each in VERSIONS:
        try:
            kubernetes_validate.validate(doc, each, strict=True)
        except kubernetes_validate.ValidationError as exc:
            found.append(f"{each}: {'.'.join(map(str, exc.path))}: {exc.message}")
        except kubernetes_validate.SchemaNotFoundError:
            found.append(f"{each} has no {doc['apiVersion']} {doc['kind']}")
    return found


def _quantities(value: Any, path: str) -> Iterator[str]:
    """Numbers with a unit, of which the schemas say that they are strings and no more."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from _quantities(each, f"{path}.{number}")
    elif isinstance(value, dict):
        for name, each in value.items():
            amounts = each if name in ("requests", "limits") and isinstance(each, dict) else {}
            amounts = {name: each} if name == "sizeLimit" else amounts
            for what, amount in amounts.items():
                if not QUANTITY.fullmatch(str(amount)):
                    yield f"{path}.{name}: {amount!r} is no quantity of {what}"
            yield from _quantities(each, f"{path}.{name}")


def nbytes(quantity: str | int) -> int:
    """Of a quantity of memory or disk."""
    number, unit = re.fullmatch(r"(\d+)([kMGTPE]i?)?", str(quantity)).groups()  # type: ignore[union-attr]
    if not unit:
        return int(number)
    return int(number) * (1024 if unit.endswith("i") else 1000) ** ("kMGTPE".index(unit[0]) + 1)
