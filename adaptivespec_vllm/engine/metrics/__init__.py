"""What is seen from outside: Prometheus metrics, the log line, the record of a request.

A worker's counts ride on vLLM's own path, step by step, so they arrive wherever vLLM's do::

    worker            TreeRunnerOutput.counted              the model runner's output with one field more
    engine core       SchedulerStats.kv_connector_stats     a field that vLLM leaves open; KV connectors are refused
    API server        TreeStatLogger                        takes them out before another logger looks

It makes no difference whether these are one process or three, on one machine or (with Ray) on several, and which of
several API servers gets a step's counts.
"""
