"""Subcommands of `wands`. Most subcommands have a file or folder here, with everything except the parsing of the options.

The functions of the other subcommands are in other packages, see `wands.cli.COMMANDS`.
"""
