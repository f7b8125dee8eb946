"""Ray's command line without the Ray client server: `python -m nibble.cluster.ray_start start …`.

A client server runs code for whoever connects to it. `ray start --head` opens one on port 10001 as soon as grpcio is
installed, and no flag turns it off (ray 2.60 scripts.py:919). It asks one function whether a client could be served; here
the answer is no.
"""

from __future__ import annotations

from ray.scripts import scripts

if __name__ == "__main__":
    scripts.get_ray_client_dependency_error = lambda: "turned off by nibble"  # pyright: ignore
    scripts.main()
