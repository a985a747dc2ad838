"""References within a JSON schema: what a `$ref` refers to."""

import json
from typing import Any
from urllib.parse import unquote, urljoin

from tgen.generation.schema_keywords import OBJECTS, SchemaError

_SCHEMAS = frozenset(  # keywords with a schema or a list of schemas
    (
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "items", "prefixItems"),
        *("additionalItems", "unevaluatedItems", "contains", "additionalProperties"),
        *("unevaluatedProperties", "propertyNames", "contentSchema"),
    )
)
_MAPS = OBJECTS | {"$defs", "definitions"}  # keywords with schemas by name


class References:
    """The schemas within a schema, by `$id`, anchor and JSON pointer."""

    def __init__(self, root: Any) -> None:
        self._resources: dict[str, Any] = {"": root}  # by address, also those of anchors
        self._bases: dict[int, str] = {}  # address of the resource that a schema is in
        nodes: list[tuple[Any, str]] = [(root, "")]
        while nodes:
            node, base = nodes.pop()
            if isinstance(node, dict):
                name = node.get("$id", node.get("id") if "$schema" in node else None)
                if isinstance(name, str):
                    base = _address(base, name).rstrip("#")
                    self._resources.setdefault(base, node)
                for key in ("$anchor", "$dynamicAnchor"):
                    if isinstance(node.get(key), str):
                        self._resources.setdefault(f"{base}#{node[key]}", node)
                self._bases[id(node)] = base
                for key, value in node.items():
                    if key in _SCHEMAS:
                        nodes.append((value, base))
                    elif key in _MAPS and isinstance(value, dict):
                        nodes += [(one, base) for one in value.values()]
            elif isinstance(node, list):
                nodes += [(one, base) for one in node]
        self._base = self._bases.get(id(root), "")

    def resolve(self, schema: dict[str, Any], path: str) -> Any:
        """Return what the `$ref` of a schema refers to. Raises SchemaError if it is elsewhere."""
        ref, base = schema["$ref"], self._bases.get(id(schema), self._base)
        address, _, fragment = _address(base, ref if isinstance(ref, str) else "").partition("#")
        node = self._resources.get(f"{address}#{fragment}")
        if node is None and (not fragment or fragment.startswith("/")):
            node = self._resources.get(address)
            for step in unquote(fragment).split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                if isinstance(node, list) and step.isdecimal():
                    node = node[int(step)] if len(step) < 9 and int(step) < len(node) else None
                else:
                    node = node.get(step) if isinstance(node, dict) else None
        if not isinstance(ref, str) or not isinstance(node, (dict, bool)):
            shown = json.dumps(ref)[:80]
            hint = "copy what it refers to into $defs"
            raise SchemaError(path, f"$ref: {shown} is not in the schema", hint)
        return node


def _address(base: str, reference: str) -> str:
    if reference.startswith("#"):  # the usual case
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference
