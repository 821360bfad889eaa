"""`wands convert`: convert models and LoRAs between the layouts of diffusers, official Wan, ComfyUI and (LoRAs) musubi-tuner."""
