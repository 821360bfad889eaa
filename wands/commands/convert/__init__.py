"""`wands convert`: convert repositories, single models and LoRAs between the file layouts of diffusers, official Wan and
ComfyUI, and compare each result with its source.
"""
