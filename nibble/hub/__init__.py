"""The Hugging Face Hub and its cache: which files of a model are on this machine."""
