"""Raw clips with their captions: the layouts of data sets, and the decoding of frames."""
