"""Files of model weights: reading, writing, tensor names, configs, LoRAs and checkpoints."""
