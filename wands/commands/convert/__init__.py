"""`wands convert`: whole repositories, components, LoRAs, and the comparison of the result with the source."""
