"""Where tables are printed."""

from rich.console import Console


def console(width: int) -> Console:
    """The terminal as wide as it is; elsewhere (a pipe, a log) ``width`` columns, so that no table is folded."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=width)
