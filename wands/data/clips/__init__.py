"""Raw clips with their captions: every layout they come in, and how their frames are decoded."""
