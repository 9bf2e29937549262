"""Where runs are made. A pool starts workers; what goes in and what comes back lies in the run's folder.

runs/NNNN/run-K/job.json      what the worker needs
runs/NNNN/run-K/attempt-N/    one start of the worker: metrics, answers, weights, logs
runs/NNNN/run-K/result.json   a link to the result of the first attempt that came to one
"""
