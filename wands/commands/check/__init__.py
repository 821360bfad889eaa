"""The command `wands check`, and its report as text for terminals, JSON for programs, and HTML for browsers."""
