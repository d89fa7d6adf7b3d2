"""Deliveries: send the changes of the log to brokers, files and sockets, in order."""
