"""Process groups, parallel dimensions, and the assignment of packed tokens to ranks."""
