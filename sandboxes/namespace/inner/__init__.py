"""The part of the namespace backend that runs in the zygote and in each sandbox.

These modules are never imported by the trainer's interpreter at run time: `launch.py` sends their source to a new
interpreter of the machine, so they use nothing but the standard library and run on Python 3.9 and later.
"""
