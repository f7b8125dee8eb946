"""Servers that tests start on this machine, the requests for them, and the limits around them."""
