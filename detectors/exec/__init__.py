"""Commands of the operator as checks.

Nothing is imported here: the warden is a process that has the standard library alone.
"""
