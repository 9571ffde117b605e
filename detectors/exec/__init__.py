"""Runs the operator's commands as health checks.

Imports nothing: the warden process uses the standard library alone.
"""
