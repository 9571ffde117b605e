"""What a training script calls: the session, its steps, and the hooks that a runtime implements.

``hooks`` is the interface between a session and its runtime. The worker package implements it for
a managed job, ``standalone`` for a script without a daemon. It imports the packages below it, and
never :mod:`tmd.trainer.worker`.
"""
