"""Every key of a config with its type, default and documentation: for help and reference pages."""

import dataclasses
import typing
from collections.abc import Iterator

from fornax.config import schema
from fornax.config.text import write_flow
from fornax.config.write import to_plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """One key: its path, type and default as text, its documentation, and the variant it is of."""

    path: str
    type: str
    default: str
    doc: str
    variant: str = ""


def describe(cls: type, prefix: str = "") -> list[Field]:
    """List the keys under a config dataclass, nested ones by their full path.

    The keys of a union's variant carry `variant`, the value of `type:` that has them. An element of
    a tuple stands as `N` in a path, a key of a dict as `KEY`.
    """
    return list(_fields(cls, schema.REQUIRED, prefix, "", ()))


def _fields(
    cls: type, base: object, prefix: str, variant: str, above: tuple[type, ...]
) -> Iterator[Field]:
    docs = schema.field_docs(cls)
    for name, key in schema.keys_of(cls).items():
        if name == "type" and schema.type_names(cls) and variant == _label(cls):
            continue  # the union that holds this variant has listed it
        path = f"{prefix}.{name}" if prefix else name
        value = key.make_default() if base is schema.REQUIRED else getattr(base, name)
        groups = _nested(key.annotation, path)
        if not (groups and dataclasses.is_dataclass(value)):
            yield Field(
                path=path,
                type=schema.type_text(key.annotation),
                default=_default(value),
                doc=docs.get(name, "") or _constant(cls, name),
                variant=variant,
            )
        for where, configs in groups:
            if len(configs) > 1:
                yield _type_key(where, configs, value, docs.get(name, ""), variant)
            for each in configs:
                if each not in (*above, cls):
                    inner = value if type(value) is each else schema.REQUIRED
                    label = _label(each) if len(configs) > 1 else variant
                    yield from _fields(each, inner, where, label, (*above, cls))


def _type_key(path: str, configs: tuple[type, ...], value: object, doc: str, variant: str) -> Field:
    chosen = _label(type(value)) if type(value) in configs else "required"
    names = " | ".join(_label(each) for each in configs)
    return Field(path=f"{path}.type", type=names, default=chosen, doc=doc, variant=variant)


def _constant(cls: type, name: str) -> str:
    """What to say of the `type` of a dataclass that stands where no other may."""
    return "The only choice here." if name == "type" and len(schema.type_names(cls)) == 1 else ""


def _label(variant: type) -> str:
    return " | ".join(map(str, schema.type_names(variant)))


def _nested(annotation: object, path: str) -> list[tuple[str, tuple[type, ...]]]:
    """The dataclasses that an annotation leads to, those of one path together."""
    found: list[tuple[str, tuple[type, ...]]] = []
    if configs := schema.variants(annotation):
        found.append((path, configs))
    for member in schema.members(annotation):
        if schema.is_tuple(member):
            found += _nested(typing.get_args(member)[0], f"{path}.N")
        elif schema.is_dict(member):
            found += _nested(typing.get_args(member)[1], f"{path}.KEY")
    return found


def _default(value: object) -> str:
    return "required" if value is schema.REQUIRED else write_flow(to_plain(value))
