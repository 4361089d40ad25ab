"""The base of environments that come from elsewhere: their tools, tasks and verifier depend on their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ValidationError

from agentrl.envs.base import Environment
from agentrl.errors import AuthoringError
from agentrl.hashing import short

M = TypeVar("M", bound=BaseModel)


class Bridge(Environment):
    """Options choose what is played: a subclass is made for each of them, once."""

    options: ClassVar[Any]
    """The checked options; the subclass for them sets it."""
    _made: ClassVar[dict[str, type[Environment]]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__()
        if not hasattr(type(self), "options"):
            raise AuthoringError(
                f"{self.name or type(self).__name__}: what it plays depends on its options; load it with them: "
                "envs.load(name, options)"
            )

    @classmethod
    def configured(cls, options: Mapping[str, Any]) -> type[Environment]:
        if hasattr(cls, "options"):
            return cls
        key = short([cls.__module__, cls.__qualname__, cls.name, dict(options), cls.version_of(options)])
        if key not in Bridge._made:
            Bridge._made[key] = cls.made_from(options)
        return Bridge._made[key]

    @classmethod
    def made_from(cls, options: Mapping[str, Any]) -> type[Environment]:
        """Make the subclass for these options."""
        raise NotImplementedError

    @classmethod
    def version_of(cls, options: Mapping[str, Any]) -> Any:
        """Return what tells apart two states of that which equal options name, such as a file."""
        return None


def checked(name: str, model: type[M], options: Mapping[str, Any]) -> M:
    """Return the options of a bridge; AuthoringError says what is wrong with them."""
    try:
        return model(**options)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors()[:3])
        raise AuthoringError(f"{name}: {problems}; see docs/bridges.md") from None
