"""Creates the project's virtual environment.

Standard library only, because it runs before anything is installed.
"""
