"""Commands that other packages register: functions under entry points of the group `GROUP`.

A command is loaded when it is called or when help lists it, so that what it needs, such as torch,
burdens no other command. Those of this package are used in spite of others of their name.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import typer
from typer.core import TyperGroup

from mosaic_opt.entry_points import Registered, loaded, registered
from mosaic_opt.errors import MosaicError, said

__all__ = ["GROUP", "CommandGroup"]

GROUP = "mosaic_opt.commands"


class CommandGroup(TyperGroup):
    """The group of all commands: those that are declared, then those that are registered."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        own = super().list_commands(ctx)
        return [*own, *(name for name in _by_name() if name not in own)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name; None where there is none.

        One that is registered and cannot be loaded is in the list, and says why when it is called.
        """
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in _by_name():
            return own
        try:
            return _command(cmd_name)
        except MosaicError as error:
            return _broken(cmd_name, str(error))


@cache
def _by_name() -> dict[str, tuple[Registered, ...]]:
    found: dict[str, tuple[Registered, ...]] = {}
    for point in registered(GROUP):
        found[point.name] = (*found.get(point.name, ()), point)
    return found


def _command(name: str) -> Any:
    """Load a registered command."""
    points = _by_name()[name]
    if len(points) > 1:
        each = " and ".join(point.origin for point in points)
        raise MosaicError(f"Command {name!r} is registered by each of {each}: keep one of them.")
    try:
        return _made(name, loaded(points[0].value))
    except (Exception, SystemExit) as error:  # a stranger's module may raise anything
        raise MosaicError(
            f"Command {name!r} of {points[0].origin} cannot be loaded: {said(error)}."
        ) from error


def _made(name: str, function: Any) -> Any:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name)(function)
    return typer.main.get_command(app)


def _broken(name: str, reason: str) -> Any:
    """Return a command that says why it cannot be loaded."""

    def command(ctx: typer.Context) -> None:
        raise MosaicError(reason)

    command.__doc__ = reason
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
        command
    )
    return typer.main.get_command(app)
