"""Machines around nibble: systemd, Podman and kernels other than this one's."""
