"""A host's numbers, for machines and for people.

    metrics     Prometheus: a collector over the hierarchy's status, and an HTTP server for it
    status      the terminal: a snapshot of the controller, drawn

Nothing is counted here. The hierarchy counts plain integers; what is shown is made of them when somebody looks.
"""
