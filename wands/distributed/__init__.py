"""Process groups, parallel dimensions, and the tokens of a pack that each rank holds."""
