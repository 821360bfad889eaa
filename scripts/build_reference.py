"""Write docs/reference/ from the option models and the recipe sections: python scripts/build_reference.py"""

from __future__ import annotations

from pathlib import Path

from wands.cli import main
from wands.config.reference import cli_page, recipe_page

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"


def build_pages() -> dict[str, str]:
    """Return file name -> Markdown."""
    return {"cli.md": cli_page(main.commands), "recipe.md": recipe_page()}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in build_pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
