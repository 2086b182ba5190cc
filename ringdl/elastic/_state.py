"""What a training loop needs to go on from: values, and the last commit of them, in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringdl import _joining, _newcomers
from ringdl._communicator import Communicator
from ringdl._errors import Error, UsageError
from ringdl._numbers import is_count
from ringdl._safetensors import Array, Arrays
from ringdl._startup import get_communicator
from ringdl._training.files import on_rank_0
from ringdl.elastic import _shards, _values
from ringdl.elastic._checkpoints import Checkpoints


@dataclass(frozen=True)
class _Commit:
    """What a rank holds of one commit.

    Attributes:
        epoch: of ranks, and
        number: which one, from 1 on.
        objects: the values themselves, as they were then, of those that stay the same objects.
        values: copies of them.
        kept: this rank's parts of arrays that are cut, and those of another rank; None if there are
            none.
        rank: of this one, then.
        size: how many ranks there were.
        differ: whether ranks were not all to have the same values, as a policy has let them differ.
    """

    epoch: int
    number: int
    objects: dict[str, Any]
    values: dict[str, Any]
    kept: _shards.Kept | None
    rank: int
    size: int
    differ: bool

    @property
    def key(self) -> tuple[int, int]:
        """The same on all ranks that have made it."""
        return self.epoch, self.number


class State:
    """What `ringdl.elastic.run` restores after ranks have failed, and gives to ranks that join.

    Values are attributes, to be read and assigned: arrays, numbers, anything that can be copied;
    what has ``state_dict`` and ``load_state_dict`` (models, optimizers, `ElasticSampler`,
    `ringdl.data.Loader`) is kept by these and stays the same object, as do NumPy's arrays that are
    no views of others. They are the same on all ranks: at first those of rank 0.

    `commit` keeps a copy in memory. After a failure each rank that is left has the values of the
    last commit again, and what was done since is done again: no step before it is lost.

    Args:
        own: arrays of which each rank has a part, by name: rows of a whole that are its alone, as
            the moments of a sharded optimizer are. Each commit sends copies to other ranks, on
            another host as far as hosts have equally many, so they survive a failure; then the
            whole is cut anew,
            earlier ranks take the remainder. They are ``state.own[name]``, to be read and assigned.
        copies: to how many ranks: so many may fail at once.
        checkpoint: a folder, which all hosts see, for commits that outlive the job: when it is
            started again, it begins with the newest. They are written by a thread meanwhile, and
            hold numbers, texts, arrays, and lists and dictionaries of such. The last two stay.
        checkpoint_every: so many commits; the same on all ranks.
        values: the values.

    Example:
        >>> state = ringdl.elastic.State(w=w, step=0)
        >>> def train(state):
        ...     while state.step < 1000:
        ...         state.w -= 0.1 * ringdl.allreduce(gradient(state.w, state.step))
        ...         state.step += 1
        ...         state.commit()
        >>> ringdl.elastic.run(train, state)
    """

    own: Arrays
    _values: dict[str, Any]
    _callbacks: list[Callable[[], object]]
    _commits: list[_Commit]
    _copies: int
    _number: int
    _first_number: int
    _has_begun: bool
    _since: int
    _trains: bool
    _checkpoints: Checkpoints | None

    def __init__(
        self,
        *,
        own: Mapping[str, Array] | None = None,
        copies: int = 1,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 100,
        **values: Any,
    ) -> None:
        taken = [name for name in values if name.startswith("_") or hasattr(State, name)]
        if taken:
            raise UsageError(f"a value of a state cannot be called {taken[0]!r}; rename it")
        self._values = values
        self._callbacks = []
        self._commits = []
        """The last two."""
        if own is not None and not hasattr(own, "keys"):
            raise UsageError("own takes arrays by name: own={'moments': rows}")
        self.own = dict(own or {})
        if not is_count(copies, at_least=0):
            raise UsageError(
                f"copies is {copies!r}: to how many other ranks parts are sent; pass 0 or more"
            )
        if not is_count(checkpoint_every):
            raise UsageError(
                f"checkpoint_every is {checkpoint_every!r}; pass a number of commits, at least 1"
            )
        self._copies = copies
        self._number = 0  # of commits
        self._first_number = 0  # what `train` has begun with
        self._has_begun = False  # some `run` has taken what a checkpoint has
        self._since = 0  # in which epoch this rank has joined; 0: it was there at the start
        self._trains = False  # `run` has called `train`, which has not returned
        self._checkpoints = (
            None if checkpoint is None else Checkpoints(checkpoint, checkpoint_every)
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"the state has no value {name!r}")
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "own":
            object.__setattr__(self, name, value)
        elif name in self._values:
            self._values[name] = value
        else:
            raise AttributeError(
                f"the state has no value {name!r}: name it where the state is made, so that all "
                "ranks keep it"
            )

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Have these called, in order, once values were restored for other ranks than before."""
        its = [*callbacks]
        if not all(map(callable, its)):
            raise UsageError(f"these are not all functions to be called: {its!r:.80}")
        self._callbacks.extend(its)

    def commit(self) -> None:
        """Keep the values as they are now. Collective; between steps, not within one.

        It costs a copy of them, and, with `own`, of this rank's parts to another rank.

        Raises:
            RankFailedError: a rank has failed; inside of `ringdl.elastic.run` that is mended.
            RanksJoin: no Exception: new ranks join, and `ringdl.elastic.run` calls `train` anew.
        """
        self._keep()
        if self._trains:
            _newcomers.at_commit()

    save = commit

    def _keep(self) -> None:
        ranks = get_communicator()
        for name, part in self.own.items():
            if getattr(part, "ndim", 0) == 0 or not isinstance(part, np.ndarray):
                raise UsageError(
                    f"own[{name!r}] is {part!r}; keep rows: an array of NumPy of one dimension or "
                    "more"
                )
        kept = _shards.keep(self.own, self._copies, ranks) if self.own else None
        number = self._number + 1
        objects = {name: each for name, each in self._values.items() if _values.stays(each)}
        differ = _joining.let_ranks_differ()
        values = self._copy()
        made = _Commit(ranks.epoch, number, objects, values, kept, ranks.rank, ranks.size, differ)
        self._number = number
        # The one before stays: a rank may have failed before others have made this one.
        self._commits = [*self._commits[-1:], made]
        if self._checkpoints is not None:
            own = {} if kept is None else kept[ranks.rank]
            self._checkpoints.offer(self._number, made.values, own, ranks)

    def check_host_updates(self) -> None:
        """For scripts that call it: ranks that fail are noticed without it."""

    def restore(self) -> None:
        """Take the values of the last commit, on this rank alone. Parts of `own` as well."""
        if not self._commits:
            raise UsageError("restore() before the first commit(): there is nothing to go back to")
        last = self._commits[-1]
        self._take(last.values, last.objects)
        if last.kept is not None:
            self.own = {name: part.copy() for name, part in last.kept[last.rank].items()}

    def sync(self, root: int = 0) -> None:
        """Take the values of one rank, on all, and commit them. Collective.

        Raises:
            UsageError: on every rank, if their states have different values.
        """
        ranks = get_communicator()
        self._check_names(ranks)
        job = None if self._checkpoints is None else self._checkpoints.job
        offered = (self._number, job, self._copy()) if ranks.rank == root else None
        taken = ranks.broadcast_object(offered, root, name="ringdl.elastic.sync")
        self._number, job, values = taken
        if self._checkpoints is not None:
            self._checkpoints.job = job
        self._take(values)
        self._keep()

    def _check_names(self, ranks: Communicator) -> None:
        """New ranks whose script has been changed end alone."""
        mine = sorted(self._values), sorted(self.own)
        offered = self._since == ranks.epoch, mine
        names = ranks.allgather_object(offered, name="ringdl.elastic.names")
        are_all_new = all(is_new for is_new, _ in names)
        for rank, (is_new, theirs) in enumerate(names):
            if theirs != mine and (are_all_new or not is_new):
                raise UsageError(
                    f"rank {ranks.rank} has a state of {mine[0]} and own parts of {mine[1]}, rank "
                    f"{rank} of {theirs[0]} and {theirs[1]}: name the same on all ranks"
                )

    def _begin(self) -> bool:
        """Take the newest checkpoint, if there is one, else the values of rank 0. Collective.

        Files are read once: another `run` goes on from the values as they are.

        Returns:
            True: see `_go_back`.
        """
        self._commits, self._since = [], 0
        checkpoints = None if self._has_begun else self._checkpoints
        if checkpoints is not None:
            like, folder = self._copy(), str(checkpoints.folder)
            found = on_rank_0(
                lambda: checkpoints.newest(like, self.own),
                f"cannot read the checkpoints in {folder!r}",
                "ringdl.elastic.checkpoint",
            )
            self._number = found.last_number
            checkpoints.job = found.job
            if found.values is not None:
                self._take(found.values)
            if found.lengths:
                self._take_own_rows(checkpoints, found.number, found.lengths)
        self.sync()
        self._has_begun = True
        self._first_number = self._number
        return True

    def _take_own_rows(
        self, checkpoints: Checkpoints, number: int, lengths: dict[str, list[int]]
    ) -> None:
        """All ranks can read their parts, or none takes any. Collective."""
        ranks = get_communicator()
        problem = None
        try:
            own = checkpoints.own_rows(number, lengths, ranks)
        except UsageError as error:
            problem = f"rank {ranks.rank}: {error}"
        problems = ranks.allgather_object(problem, name="ringdl.elastic.own")
        for each in problems:
            if each is not None:
                raise UsageError(each)
        self.own = own

    @contextmanager
    def _in_train(self) -> Iterator[None]:
        """Meanwhile new ranks may join at a commit."""
        self._trains = True
        try:
            yield
        finally:
            self._trains = False

    def _join(self) -> None:
        """This rank takes part from now on: `_go_back` gives it values, and no file does."""
        self._since, self._has_begun = get_communicator().epoch, True

    def _finish(self) -> None:
        """Wait until the checkpoint that was begun is written, if one was."""
        if self._checkpoints is not None:
            self._checkpoints.finish()

    def _go_back(self) -> bool:
        """After ranks have failed, or joined: take the last commit that all have. Collective.

        A commit can be taken if all that were there when it was made have it, but those that have
        failed. Those that have joined since take it from them.

        Returns:
            Whether `train` has made one since it was called.

        Raises:
            Error: on every rank: what it takes is lost with those that have failed.
        """
        ranks = get_communicator()
        mine = self._since, [commit.key for commit in self._commits], bool(self.own)
        offered = ranks.allgather_object(mine, name="ringdl.elastic.commits")
        were_there = [keys for since, keys, _ in offered if since == 0]
        known = {key for _, keys, _ in offered for key in keys}
        whole = [
            key
            for key in known
            if all(key in keys for since, keys, _ in offered if since <= key[0])
        ]
        goes_on = all(were_there)
        if not known and not were_there:
            raise Error(
                "all ranks that had the last commit have failed, before those that have joined got "
                "it; start again from a checkpoint"
            )
        if not goes_on:  # the first one has not ended everywhere, so nothing is trained
            self._begin_again(ranks)
        elif not whole:  # some rank was two ahead
            if any(has_own for _, _, has_own in offered):
                raise Error(
                    "a rank has failed, and with it is lost what it had in `own`, of which no "
                    "other rank has a copy; start again, with copies=1 or more"
                )
            root = min((max(keys), rank) for rank, (_, keys, _) in enumerate(offered) if keys)[1]
            if ranks.rank == root:
                self.restore()
            self.sync(root)
        else:
            holders = [rank for rank, (_, keys, _) in enumerate(offered) if max(whole) in keys]
            goes_on = self._take_whole(max(whole), holders, ranks)
        for callback in self._callbacks:
            callback()
        self._first_number = self._number  # one may commit
        return goes_on

    def _take_whole(
        self, key: tuple[int, int], holders: Sequence[int], ranks: Communicator
    ) -> bool:
        """Take a commit. Collective.

        Args:
            key: of the commit.
            holders: the ranks that have it.
            ranks: all of them.

        Returns:
            Whether it was made since `train` was called.
        """
        self._commits = [each for each in self._commits if each.key == key]
        commit = self._commits[0] if self._commits else None
        kept, place = {}, None
        if commit is not None:
            self._take(commit.values, commit.objects)
            self._number = commit.number
            kept, place = commit.kept or {}, (commit.rank, commit.size)
        differs = commit is not None and commit.differ
        told = ranks.allgather_object((place, differs), name="ringdl.elastic.former")
        former, differ = zip(*told, strict=True)
        own = _shards.cut_anew(kept, former, ranks)
        if own is not None:
            self.own = own
        goes_on = self._number > self._first_number
        if len(holders) < ranks.size or any(differ):  # all go on from the parameters of one
            self.sync(holders[0])
        elif own is not None:
            self._keep()
        return goes_on

    def _begin_again(self, ranks: Communicator) -> None:
        """Collective.

        Raises:
            Error: on every rank: what others had in `own` is nowhere else yet.
        """
        told = ranks.allgather_object((bool(self.own), self._has_begun), name="ringdl.elastic.own")
        # Some may have taken what the files have, and others not.
        self._has_begun = all(has_begun for _, has_begun in told)
        has_files = self._checkpoints is not None and not self._has_begun
        if any(has_own for has_own, _ in told) and not has_files:
            raise Error(
                "a rank has failed before the first commit had ended, and with it is lost what it "
                "had in `own`; start again"
            )
        if self._commits:
            self.restore()
        self._begin()

    def _copy(self) -> dict[str, Any]:
        return {name: _values.save(name, value) for name, value in self._values.items()}

    def _take(self, values: Mapping[str, Any], objects: Mapping[str, Any] | None = None) -> None:
        """Take values that were saved, in place of those that are there, or of these objects."""
        into = self._values if objects is None else objects
        for name, saved in values.items():
            self._values[name] = _values.restore(into.get(name), saved)


ArrayState = JaxState = ObjectState = State
