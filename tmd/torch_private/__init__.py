"""The parts of torch that have no public name, behind functions that do.

Each module covers one component of torch. A name that a torch release changes fails in
``tests/torch_private`` and nowhere else. Fabric and trainer import this package; it imports only
torch. Written against torch 2.11 to 2.15.
"""
