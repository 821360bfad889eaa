"""Report of a training run: read the run folder into one dict, and write one HTML page."""
