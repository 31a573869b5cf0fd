"""The base of configurations that hold the ``LongNetConfig`` of an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, Self

from dilated_attention_pytorch.checks import as_number
from dilated_attention_pytorch.integers import as_integer
from dilated_attention_pytorch.models.config import LongNetConfig


class NestedConfig:
    """A frozen dataclass with the field ``encoder`` and further fields that JSON can hold."""

    __slots__ = ()
    encoder: LongNetConfig

    def check_fields(self, integers: Mapping[str, int], numbers: tuple[str, ...] = ()) -> None:
        """Raise unless these fields are integers of at least the given value, or positive numbers."""
        if not isinstance(self.encoder, LongNetConfig):
            raise TypeError(f"encoder must be a LongNetConfig, got {type(self.encoder).__name__}")
        for name, expected in (("positions", "none"), ("vocab_size", None)):
            value = getattr(self.encoder, name)
            if value != expected:
                raise ValueError(f"the encoder of a {type(self).__name__} has {name}={expected!r}, got {value!r}")
        for name, least in integers.items():
            object.__setattr__(self, name, as_integer(name, getattr(self, name), least))
        for name in numbers:
            value = as_number(name, getattr(self, name))
            if value is None or isinstance(value, bool) or value <= 0.0:
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)!r}")
            object.__setattr__(self, name, float(value))

    def replace(self, **changes: Any) -> Self:
        """The same configuration with other values for some fields."""
        _check_names(type(self), changes)
        return replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """The fields by name. The encoder is a dictionary of its own fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return values | {"encoder": self.encoder.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration with these fields. Unknown and missing fields raise and are listed."""
        if not isinstance(values, Mapping):
            raise TypeError(f"a configuration is a dictionary of its fields, got {type(values).__name__}")
        _check_names(cls, values)
        needed = [field.name for field in fields(cls) if field.default is MISSING]  # type: ignore[arg-type]
        missing = [name for name in needed if name not in values]
        if missing:
            raise ValueError(f"a {cls.__name__} needs the fields {', '.join(needed)}; missing: {', '.join(missing)}")
        return cls(**{**values, "encoder": LongNetConfig.from_dict(values["encoder"])})


def _check_names(config: type, values: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(config)]
    unknown = [str(name) for name in values if name not in known]
    if unknown:
        raise ValueError(f"{config.__name__} has no fields {', '.join(unknown)}; its fields are {', '.join(known)}")
