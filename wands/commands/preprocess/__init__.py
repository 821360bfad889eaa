"""`wands preprocess`: scan the source, decode in subprocesses, encode, commit the cache."""
