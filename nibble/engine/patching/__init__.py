"""nibble's changes to other projects: patch series, and the probes that show their need."""
