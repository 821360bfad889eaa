"""Raw clips with their captions: list the clips of a data set, and decode their frames."""
