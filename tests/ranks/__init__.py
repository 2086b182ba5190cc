"""Checks that all ranks of a job run together: functions ``check_...``.

They take the communicator, or nothing and use the default one. Under MPI:
``python -m ringdl run -n 3 -m tests.ranks``. Those that take a communicator are also run by
tests/unit/test_communicator.py, with ranks that are threads.
"""
