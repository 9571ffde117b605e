"""The daemon over HTTP: health, metrics, state, events, a page, and operators' requests.

Read-only except for four requests that need a token. It decides nothing, and the daemon never
waits for it.
"""
