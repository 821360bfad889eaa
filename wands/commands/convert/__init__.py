"""What `wands convert` is made of: whole repositories, their parts, LoRAs, and the proof that all came through."""
