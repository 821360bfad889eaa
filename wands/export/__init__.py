"""Export of a trained model: DiT weights and LoRAs as files for other programs, the model card, and the upload to the Hub."""
