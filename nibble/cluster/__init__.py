"""Several machines that serve one model: membership, compatibility, and loss of a node."""
