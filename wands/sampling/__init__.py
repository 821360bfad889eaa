"""Sampling of videos: pipelines, LoRAs, requests, images, one video on one or several ranks, and contact sheets."""
