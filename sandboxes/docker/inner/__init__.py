"""The part of the docker backend that runs in each container.

As with the namespace backend, its source is sent to an interpreter inside: the standard library alone, and nothing of
the trainer's is imported there.
"""
