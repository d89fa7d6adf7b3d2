"""Services of an apply process for its sinks: Spark session, leases, throttle, progress, requests."""
