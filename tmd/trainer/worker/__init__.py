"""The worker of a managed job: carries out directives between the steps of a script.

``join`` starts it, ``agent`` talks to the daemon, ``coordinator`` implements the session's hooks,
and each other module carries out one kind of directive. It may import every other trainer package;
none imports it.
"""
