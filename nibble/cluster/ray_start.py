"""Ray's command line without the Ray client server: `python -m nibble.cluster.ray_start start …`.

A client server runs code for every client that connects. `ray start --head` opens one on port 10001
as soon as grpcio is installed, and no flag turns it off (ray 2.60 scripts.py:919). Ray calls one
function to find whether it can serve clients; here that function answers no.
"""

from __future__ import annotations

import sys

from ray._private.utils import get_dashboard_dependency_error
from ray.scripts import scripts

if __name__ == "__main__":
    if missing := get_dashboard_dependency_error():
        # Ray would start without its agents, whose ports the preflight then finds closed.
        sys.exit(
            f"Error: Ray is installed without its agents' packages ({missing}): install"
            " ray[default]"
        )
    scripts.get_ray_client_dependency_error = lambda: "turned off by nibble"  # pyright: ignore
    scripts.main()
