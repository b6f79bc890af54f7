"""This process' place according to launchers, for users: world/environment.py."""

from keras_hvd.world.environment import LaunchEnvironmentError, World, check_size, world
from keras_hvd.world.launchers.variables import job_name

__all__ = ["LaunchEnvironmentError", "World", "check_size", "job_name", "world"]
