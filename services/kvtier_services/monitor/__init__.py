"""A host's numbers, for machines and for people.

    metrics     Prometheus: a collector over the hierarchy's status, and an HTTP server for it
    snapshot    the whole fleet at one moment, judged once: what every view shows
    status      the terminal's view
    page        a browser's view, served by the controller's process
    words       sizes and times for people

Nothing is counted here. The hierarchy counts plain integers; what is shown is made of them when somebody looks.
"""
