"""The packed Wan transformer, its rotary positions and its loading."""
