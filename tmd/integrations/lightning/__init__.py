"""PyTorch Lightning on a session: ``Trainer(strategy=TmdStrategy())``.

docs/start/lightning.md says what it supports. ``strategy`` joins the job, ``loop`` has the epochs,
``progress`` the state that moves with a rank, ``refused`` what cannot run.
"""

try:
    from tmd.integrations.lightning.strategy import TmdStrategy
except ModuleNotFoundError as error:
    if error.name not in ("lightning", "lightning.pytorch"):
        raise
    raise ImportError(
        "tmd.integrations.lightning needs lightning: run pip install 'tmd-trainmover[lightning]'"
    ) from error

__all__ = ["TmdStrategy"]
