"""Every mistake a user can make ends as a :class:`WandsError`; `wands.cli` alone turns one into exit code 2.

A message names the key, the value, the rule that is broken and the cure:
``parallel.ulysses_degree=8 must divide num_heads=12 of wan2.1-t2v-1.3b; use 1, 2, 3, 4, 6 or 12.``
"""


class WandsError(Exception):
    """A mistake that the user can mend; its text is the whole message.

    Attributes:
        agreed: every rank of the process group raises the same text, so one of them is enough to print it.
    """

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


class ConfigError(WandsError):
    """A recipe, a ``--set`` or a DeepSpeed JSON asks for something that cannot be."""


class DataError(WandsError):
    """A source of clips, a caption or a clip cannot be used."""


class CacheError(WandsError):
    """A latent cache is missing, damaged, or made for another model."""


class CheckpointError(WandsError):
    """A checkpoint is missing, incomplete, or was made by another world."""
