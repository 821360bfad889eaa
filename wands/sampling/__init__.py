"""Sampling of videos: pipelines, LoRAs, sample requests, images, ranks that share a video, and contact sheets."""
