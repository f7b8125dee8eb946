"""Faults that the canary must find, and the reports in which it finds them."""
