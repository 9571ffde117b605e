"""Variables shared by a campaign and its training processes. Imports nothing, for use by both."""

FAULTS = "TMD_FAULTS"
"""Environment: faults of the whole run, comma-separated."""
FOLDER = "TMD_FAULTS_FOLDER"
"""Environment: folder of orders and marks."""
RELAY = "TMD_FAULTS_RELAY"
"""Environment: socket that answers with the port through which to dial a peer."""
ORDERS = "orders"
