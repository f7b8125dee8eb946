"""Several models on one port: budgets, engines, and the loop that loads and unloads them."""
