"""Sampling: pipelines and LoRAs, requests and images, one sample, one video shared by ranks, contact sheets."""
