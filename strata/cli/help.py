"""How typer's help pages look: a switch takes no value, so none is named for it."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


def _without_values(params: Any) -> Any:
    """Empty the metavar of every switch, those that typer adds by itself (--help) included: it would be ``<bool>``."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help names values for those options only that take one, and whose usage errors are JSON, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; where --json was asked for, a wrong option is said in a document on stdout as well."""
        asked_for_json = "--json" in args
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if asked_for_json and hasattr(error, "format_message"):
                from strata.cli.output import emit_error

                emit_error(ctx.command_path, error.format_message(), f"See {ctx.command_path} --help")
            raise

    def get_params(self, ctx: Any) -> Any:
        """See the class's text."""
        return _without_values(super().get_params(ctx))


class Group(TyperGroup):
    """See `Command`."""

    def get_params(self, ctx: Any) -> Any:
        """See the class's text."""
        return _without_values(super().get_params(ctx))
