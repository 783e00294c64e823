"""JSON Schema, the part of it that npattn's schemas use."""

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def errors(value, schema, path="report"):
    """Yield the places where a value differs from a schema (the part of JSON Schema used)."""
    known = {"$schema", "title", "description", "type", "enum", "anyOf", "items", "properties"}
    assert set(schema) <= known | {"required", "additionalProperties"}
    if "anyOf" in schema and all(list(errors(value, one)) for one in schema["anyOf"]):
        yield f"{path} is {value!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is {value!r}"
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (kind != "boolean" and value is True)):
        yield f"{path} is no {kind}"
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from errors(item, schema.get("items", {}), f"{path}[{i}]")
    if isinstance(value, dict):
        yield from (f"{path} lacks {n}" for n in schema.get("required", ()) if n not in value)
        more = schema.get("additionalProperties", {})
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, more)
            if inner is False:
                yield f"{path} has {name}"
            else:
                yield from errors(item, {} if inner is True else inner, f"{path}.{name}")
