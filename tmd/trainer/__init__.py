"""API of the training process: the session that lets a rank move (docs/how/step.md).

>>> import tmd.trainer
>>> session = tmd.trainer.join()
"""

from tmd.trainer.session import environment
from tmd.trainer.session.session import Session
from tmd.trainer.session.step import Step, StepResult
from tmd.trainer.state.placing import DataPlace
from tmd.trainer.state.replicas import replicas_along
from tmd.trainer.state.step_sampler import StepSampler
from tmd.trainer.worker.join import join

__all__ = ["DataPlace", "Session", "Step", "StepResult", "StepSampler", "join", "replicas_along"]

environment.watch()
