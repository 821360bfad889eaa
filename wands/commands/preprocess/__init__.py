"""What `wands preprocess` is made of: the scan, the leader's job, its workers, and each worker's share."""
