"""Decode steps of which the host only launches CUDA graphs; see docs/step_graph.md.

- qualify.py: which step may, and which sampler it needs. Pure functions.
- facts.py: what vLLM's objects say about that.
- follow.py: gives vLLM's workers and schedulers what follows.
- runner.py: the model runner that decides for each step.
- graphs.py, changes.py, output.py: capture and launch; new cache blocks; tokens to the host.
- drafts.py: the drafter's graphs, and what lies between them.
- tables.py: vLLM's tables at fixed addresses.
- cache_slots.py: less work for the scheduler.
- probe.py: whether vLLM's code is what the graphs repeat.
- counts.py: the counter on /metrics.
"""
