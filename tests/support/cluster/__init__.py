"""Nodes of a cluster, as containers and as processes, and the manifests for Kubernetes."""
