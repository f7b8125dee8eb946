"""A folder with an image, a model and their checksums, for a machine without a network."""
