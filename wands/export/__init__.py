"""What `wands push` puts on the Hub: the repository and its card."""
