"""The part of the docker backend that runs in each container.

As with the namespace backend, its source is sent to an interpreter inside: it uses the standard library alone and
imports nothing of the trainer's.
"""
