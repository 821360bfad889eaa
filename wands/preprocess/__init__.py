"""The command `wands preprocess`: encode clips and captions into a latent cache."""
