"""`wands check`: its report for terminals, programs and browsers."""
