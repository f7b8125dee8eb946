"""Model folders that tests write: shapes, weights, tokenizers, and damage to them."""
