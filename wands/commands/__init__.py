"""Subcommands of `wands`, without the parsing of their options. The others are in other packages, see `wands.cli.COMMANDS`."""
