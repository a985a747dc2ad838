"""`--help`: usage, description, and a panel per group of options.

It looks like Typer's own help, whose module imports a Markdown parser and a syntax highlighter.
"""

from typing import Any

from rich.highlighter import RegexHighlighter
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tgen.cli import console


class _Flags(RegexHighlighter):
    highlights = (
        r"(^|\W)(?P<green>-\w+)(?![a-zA-Z0-9])",
        r"(^|\W)(?P<cyan>--[\w\-]+)",
        r"(?P<yellow><[^>]+>)",
    )


_highlight = _Flags()


def print_help(command: Any, context: Any) -> None:
    """Print the help of a command or group to stdout."""
    first, *others = command.help.split("\n\n")
    texts = [Text(first), *(Text(paragraph, "dim") for paragraph in others)]
    usage = _highlight(Text(command.get_usage(context), "bold"))
    description = _highlight(Text("\n\n").join(texts))
    console.show(Padding(usage, 1), Padding(description, (0, 1, 1, 1)))
    for title, parameters in list_panels(command, context).items():
        _show_panel(title, [_row(one, context) for one in parameters])
    commands = getattr(command, "commands", {}).values()
    if commands:
        _show_panel("Commands", [[Text(one.name, "bold cyan"), Text(one.help)] for one in commands])


def list_panels(command: Any, context: Any) -> dict[str, list[Any]]:
    """Return the parameters of a command by the title of their panel, arguments first."""
    panels: dict[str, list[Any]] = {}
    for one in sorted(command.get_params(context), key=lambda one: not _is_argument(one)):
        title = getattr(one, "rich_help_panel", None)
        default = "Arguments" if _is_argument(one) else "Options"
        panels.setdefault(title or default, []).append(one)
    return panels


def label_type(parameter: Any, context: Any) -> str:
    """Return what follows an option, such as `<int>`; "" for flags and arguments."""
    if _is_argument(parameter) or parameter.is_flag:
        return ""
    return str(parameter.display_type_rich(ctx=context))


def format_default(parameter: Any) -> str:
    """Return the default of a parameter as text; "" if it is not shown."""
    shown = parameter.show_default
    default = shown if isinstance(shown, str) else parameter.default if shown else ""
    return "" if default is None or default is False else str(default)


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _row(parameter: Any, context: Any) -> list[Text]:
    flags = [parameter.metavar] if _is_argument(parameter) else parameter.opts
    long, short = ([f for f in flags if ("--" in f) == is_long] for is_long in (True, False))
    text = Text(parameter.help or "")
    default = format_default(parameter)
    if default:
        default = f"({default})" if isinstance(parameter.show_default, str) else default
        text.append(f" [default: {default}]", "dim")
    if parameter.required:
        text.append(" [required]", "dim red")
    label = Text(label_type(parameter, context), "yellow", overflow="fold")
    names = (long, short, parameter.secondary_opts)
    return [*(_highlight(Text(",".join(some), "bold")) for some in names), label, text]


def _show_panel(title: str, rows: list[list[Text]]) -> None:
    table = Table(show_header=False, expand=True, box=None, padding=(0, 1), pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.show(Panel(table, border_style="dim", title=title, title_align="left"))
