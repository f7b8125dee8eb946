"""The image, for tests of several containers."""

from images import *  # noqa: F403 - fixtures
