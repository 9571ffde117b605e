"""The daemon over HTTP: health, metrics, state, events, a page, and operators' requests.

Read-only but for four requests that need a token. It decides nothing, and the daemon does not wait
for it.
"""
