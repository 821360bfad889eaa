"""The command `wands init`, and the templates of the files that it writes."""
