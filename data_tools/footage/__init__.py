"""Programs that turn films into captioned, scored and filtered clips. They write tables that `wands check` reads."""
