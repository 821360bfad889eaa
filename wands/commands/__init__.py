"""Subcommands of `wands`. Each subcommand has a file or folder here, with everything except the parsing of its options."""
