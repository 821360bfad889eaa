"""The control channel of the examples, which knows only `import wands`; no file of wands knows it."""

from examples.control_channel import Control, plugin

__all__ = ["Control", "plugin"]
