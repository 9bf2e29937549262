"""The `nightshift` command as it is installed."""

from nightshift.startup import begin


def main() -> None:
    begin()
    from nightshift.cli.main import commands

    commands()
