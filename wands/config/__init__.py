"""Recipe sections, command-line options, and the merge of the DeepSpeed JSON with the recipe."""
