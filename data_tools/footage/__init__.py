"""Commands that split films into clips, measure clips and caption clips. They write tables that `wands check` reads."""
