"""The code of a trial's process: `python -m nibble.trials.worker` reads a trial on stdin and writes
JSON lines, {"phase": …} and at last {"result": …}.
"""
