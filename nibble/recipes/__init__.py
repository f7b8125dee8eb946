"""Recipes and known risks: what is known about serving a model on a target."""
