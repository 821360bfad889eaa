"""One file per subcommand: everything that `wands X` does apart from parsing its options."""
