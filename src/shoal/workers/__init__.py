"""Several processes that serve as one: fronts, which speak HTTP, and the model process, which has the models.

A front decodes requests and encodes answers. Each task goes over a Unix socket to the model process, whose gateway
counts, admits, batches and runs it, together with those of all other fronts. What is more than running a task (admin,
lists, metrics) is handed over as a whole request. The supervisor starts the processes again when they end.
"""
