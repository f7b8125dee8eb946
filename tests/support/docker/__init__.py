"""The CPU image and its containers."""
