"""Several machines that serve one model: who they are, whether they fit together, and what
happens when one is lost.
"""
