"""What `wands check` says, in a terminal and in a browser."""
