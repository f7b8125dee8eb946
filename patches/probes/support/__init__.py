"""What several probes need: a fake GPU, a compiler, readers of sources and of fat binaries."""
