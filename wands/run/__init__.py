"""The described run: its model, data and schedule before the first step, and the logs that it writes."""
