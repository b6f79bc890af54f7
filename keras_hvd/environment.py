"""What launchers say of a process' place, for users: keras_hvd/world/environment.py."""

from keras_hvd.world.environment import LaunchEnvironmentError, World, check_size, world
from keras_hvd.world.launchers.variables import job_name

__all__ = ["LaunchEnvironmentError", "World", "check_size", "job_name", "world"]
