"""Files of weights: reading, writing, names, configs, LoRAs and checkpoints."""
