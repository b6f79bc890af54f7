"""Ray: Ray Train's workers, or actors, are the ranks of a job.

Ray is imported when one of these names is first used.
"""

from typing import TYPE_CHECKING

from keras_hvd.job.installed import install_command
from keras_hvd.lazy_names import importer

if TYPE_CHECKING:
    from keras_hvd.ray.executor import ElasticRayExecutor as ElasticRayExecutor
    from keras_hvd.ray.executor import RayExecutor as RayExecutor
    from keras_hvd.ray.report_callback import ReportCallback as ReportCallback
    from keras_hvd.ray.report_callback import resume as resume
    from keras_hvd.ray.trainer import Config as Config
    from keras_hvd.ray.trainer import KerasTrainer as KerasTrainer

_DEFINED_IN = {
    "Config": "trainer",
    "ElasticRayExecutor": "executor",
    "KerasTrainer": "trainer",
    "RayExecutor": "executor",
    "ReportCallback": "report_callback",
    "resume": "report_callback",
}

__all__ = sorted(_DEFINED_IN)

__getattr__, __dir__ = importer(
    __name__, _DEFINED_IN, ["ray"], lambda: f"install it: {install_command('ray')}"
)
