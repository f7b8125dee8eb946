"""Makes the project-local virtual environment; standard library only, as it runs before anything
is installed.
"""
