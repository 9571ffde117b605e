"""The session that a training script calls, its steps, and the hooks that a runtime implements.

``hooks`` is the interface between a session and its runtime. The worker package implements it for
a managed job, ``standalone`` for a script without a daemon. This package imports those below it,
never :mod:`tmd.trainer.worker`.
"""
