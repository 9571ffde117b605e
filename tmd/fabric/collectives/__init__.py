"""The collective algorithms: functions over a :class:`~tmd.fabric.collectives.op.Op`.

``allreduce`` and ``on_tensors`` choose among them. Groups call them in a thread of their own, and
``completion`` finishes an all-reduce that a loss has broken. They know ranks and links, but no
epochs.
"""
