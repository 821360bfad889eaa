"""`wands convert`: conversion of whole repositories, single models and LoRAs, and the comparison of the result with the
source.
"""
