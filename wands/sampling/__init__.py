"""What `wands infer` is made of: the pipeline and its LoRAs, requests and their pictures, one sample, sharing it over ranks."""
