"""The benchmark, of a ringdl that makes mistakes on the last rank: one element in each half."""

import sys

import ringdl
from ringdl import cli

right = ringdl.Communicator.allreduce_


def wrong(self, x, *args, **kwargs):
    result = right(self, x, *args, **kwargs)
    if x.dtype.kind == "f" and self.rank == self.size - 1:
        result[[0, -1]] += 1
    return result


ringdl.Communicator.allreduce_ = wrong
ringdl.allreduce_ = lambda x, *args: wrong(ringdl.get_communicator(), x, *args)
sys.exit(cli.main(["bench", *sys.argv[1:]]))
