"""Groups of options: a dataclass whose fields are the options that several commands have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command for Typer: each parameter whose type is a dataclass is replaced with the dataclass's
    fields, which are options. All parameters are keywords.
    """
    groups: dict[str, type[Any]] = {}
    options: list[inspect.Parameter] = []
    # Not get_type_hints: in Python 3.10 it adds an Optional to parameters whose default is None.
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            kinds = get_type_hints(groups[name], include_extras=True)
            options += [
                keyword(field.name, field.default, kinds[field.name]) for field in fields(groups[name])
            ]
        else:
            options.append(keyword(name, parameter.default, parameter.annotation))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def keyword(name: str, default: object, kind: object) -> inspect.Parameter:
    """A parameter of a command for Typer."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
