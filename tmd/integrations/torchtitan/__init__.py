"""torchtitan: its trainer on a session (docs/start/torchtitan.md).

>>> from tmd.integrations.torchtitan import protected
>>> config = protected(llama3_debugmodel())
>>> config.build().train()
"""

try:
    import torchtitan  # noqa: F401
except ImportError as error:
    raise ImportError(
        "tmd.integrations.torchtitan needs torchtitan: run pip install 'tmd-trainmover[torchtitan]'"
    ) from error

from tmd.integrations.torchtitan import cpu

cpu.use()

from tmd.integrations.torchtitan.trainer import Trainer, protected  # noqa: E402

__all__ = ["Trainer", "protected"]
