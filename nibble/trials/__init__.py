"""Trials: one kernel at a time in a separate process with a time limit, first for truth against
float64, then for time.

`nibble selftest`, `nibble tune` and the first start of a model on a GPU run them. A kernel that is
wrong, hangs, crashes its process or returns NaN costs that process alone, and has a name.

- trial.py: what a trial asks and answers, and the verdict. Pure.
- catalog.py: the trials of a target. Pure.
- choose.py: which kernel each shape of a model gets from the measured times. Pure.
- record.py: results in nibble's cache, by GPU, driver and build.
- run.py: starts and ends the processes.
- worker: the code that runs in them. It alone imports torch.
"""
