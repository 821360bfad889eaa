"""`wands convert`: convert models and LoRAs between the file layouts of diffusers, official Wan and ComfyUI.

Each result is compared with its source. LoRAs can also be converted to the file layout of musubi-tuner.
"""
