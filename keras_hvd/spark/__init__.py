"""Apache Spark: the tasks of a barrier stage start the ranks of a job.

Spark is imported when one of these names is first used.
"""

from typing import TYPE_CHECKING

from keras_hvd.job.installed import install_command
from keras_hvd.lazy_names import importer

if TYPE_CHECKING:
    from keras_hvd.spark.estimator import KerasEstimator as KerasEstimator
    from keras_hvd.spark.function import run as run
    from keras_hvd.spark.function import run_elastic as run_elastic
    from keras_hvd.spark.model import KerasModel as KerasModel
    from keras_hvd.spark.rank import rows as rows

_DEFINED_IN = {
    "KerasEstimator": "estimator",
    "KerasModel": "model",
    "rows": "rank",
    "run": "function",
    "run_elastic": "function",
}

__all__ = sorted(_DEFINED_IN)

__getattr__, __dir__ = importer(
    *(__name__, _DEFINED_IN, ["pyspark", "pyarrow"]),
    lambda: f"install it: {install_command('spark')}",
)
