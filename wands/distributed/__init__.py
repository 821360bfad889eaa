"""Process groups, parallel dimensions, and the tokens of a bin that each rank holds."""
