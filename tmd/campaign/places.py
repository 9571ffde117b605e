"""Where a campaign and the training processes find each other. Imports nothing, so both may."""

FAULTS = "TMD_FAULTS"
"""Environment: faults of the whole run, comma-separated."""
FOLDER = "TMD_FAULTS_FOLDER"
"""Environment: where orders come from and marks are left."""
RELAY = "TMD_FAULTS_RELAY"
"""Environment: the socket that tells the port by which a peer is to be dialled."""
ORDERS = "orders"
