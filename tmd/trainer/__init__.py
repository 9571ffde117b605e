"""In the training process: the session that lets a rank move (DESIGN section 5).

>>> import tmd.trainer
>>> session = tmd.trainer.join()
"""

from tmd.trainer import environment
from tmd.trainer.data import StepSampler
from tmd.trainer.join import join
from tmd.trainer.replicas import replicas_along
from tmd.trainer.session import Session
from tmd.trainer.step import Step

__all__ = ["Session", "Step", "StepSampler", "join", "replicas_along"]

environment.watch()
