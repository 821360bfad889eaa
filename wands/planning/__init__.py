"""What a run takes of each GPU and how long its steps are, before it starts: arithmetic on shapes, no device."""
