"""Page of a training run: what the run folder contains, as one dict and as one HTML file."""
