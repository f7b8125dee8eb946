"""What nibble changes in other projects: patch series, and the probes that show each change to
be needed.
"""
