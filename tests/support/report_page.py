"""A parser of the report page."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags, and the values of attributes that name a file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "poster")]
        assert not any(name.startswith("on") for name, _ in attributes)
