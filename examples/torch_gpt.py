"""A small GPT learns to write Python from the standard library, on any number of ranks.

    python examples/torch_gpt.py                         # alone; no MPI needed
    ringdl run -n 2 examples/torch_gpt.py      # two ranks here
    mpirun -n 8 python examples/torch_gpt.py             # or as your cluster starts jobs

An ordinary single-machine script, and these lines that make it distributed:

    + import ringdl
    + import ringdl.torch as hvd
    + ringdl.init()
    + optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    + hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    + hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    - rows = batch_rows(step)
    + rows = batch_rows(step)[ringdl.rank() :: ringdl.size()]
    + if ringdl.rank() == 0:                             # around what is printed or written

Each step's global batch depends on the seed and the step alone, and the ranks share its rows out.
So any number of ranks sees the same batches and trains the same model, up to the rounding of sums,
and a checkpoint continues on any number of ranks. ``--batch`` is global: with more ranks, each has
fewer rows.
Needs torch, safetensors and tqdm.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from tqdm import tqdm

import ringdl
import ringdl.torch as hvd

VOCABULARY = 128  # ASCII
RECENT = 4
CORPUS_BYTES = 8 << 20
VALIDATION_ROWS = 128
REPORT_SECONDS = 10
SHAPE = ("layers", "heads", "width", "context", "batch", "seed")  # what a checkpoint decides


class Block(nn.Module):
    """Causal self-attention, then a two-layer network, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.network_norm = nn.LayerNorm(width)
        self.network_in = nn.Linear(width, 4 * width, bias=False)
        self.network_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        projected = self.query_key_value(self.attention_norm(x))
        split = projected.view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(rows, length, width))
        hidden = functional.gelu(self.network_in(self.network_norm(x)), approximate="tanh")
        return x + self.network_out(hidden)


class GPT(nn.Module):
    """Characters in, (rows, length) int64; logits of the next one out, (rows, length, 128).

    A position's input is the sum of embeddings of its last four characters, with a table for each
    age: single characters say little, and short runs help long before attention has learned to
    find them.
    """

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.recent = nn.ModuleList(nn.Embedding(VOCABULARY, width) for _ in range(RECENT))
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith("_out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers if into_residual else 1))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.positions.weight[: text.shape[1]]
        for age, table in enumerate(self.recent):
            x = x + functional.pad(table(text[:, : text.shape[1] - age]), (0, 0, age, 0))
        return self.head(self.norm(self.blocks(x)))

    def loss(self, rows: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Nats per character over rows of context + 1 characters."""
        logits = self(rows[:, :-1]).flatten(0, 1)
        return functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction=reduction)


def read_corpus() -> tuple[bytes, bytes]:
    """The standard library's top-level modules as ASCII; every tenth file is for validation.

    Returns:
        The text for training and the text for validation.
    """
    texts: tuple[list[bytes], list[bytes]] = ([], [])
    folder = Path(sysconfig.get_paths()["stdlib"])
    for index, path in enumerate(sorted(folder.glob("*.py"))):
        text = path.read_text(encoding="utf-8", errors="replace")
        texts[index % 10 == 9].append(text.encode("ascii", errors="replace"))
    if not texts[1]:
        raise FileNotFoundError(f"{folder} holds too few *.py files to learn from")
    return b"\n".join(texts[0])[:CORPUS_BYTES], b"\n".join(texts[1])[: CORPUS_BYTES // 8]


def take_rows(text: np.ndarray, starts: np.ndarray, context: int) -> torch.Tensor:
    """Rows of context + 1 characters, (len(starts), context + 1) int64."""
    return torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))


def learning_rate(progress: float, batch: int) -> float:
    """Warmed up over the first 5% of the run, then a cosine down to a tenth.

    Scaled with the square root of the global batch, as suits Adam (Malladi et al. 2022).
    """
    peak = 2e-3 * math.sqrt(batch / 16)
    return peak * min(progress / 0.05, 0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0)))


def threads_of_this_rank() -> int:
    """This rank's cores, divided by the ranks that may use the same ones; OMP_NUM_THREADS rules.

    Collective. Without binding, all of a host's ranks may use all its cores: each takes its part.
    """
    cores = os.sched_getaffinity(0)
    mine = np.array([[ringdl.host_rank(), min(cores), len(cores)]])
    sharers = int((ringdl.allgather(mine) == mine).all(axis=1).sum())
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return max(1, len(cores) // sharers)


def save_checkpoint(
    path: Path, model: GPT, optimizer: torch.optim.Optimizer, step: int, shape: dict[str, int]
) -> None:
    """Parameters, optimizer state and step in one safetensors file, whole or not at all."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": tensor for name, tensor in state.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata={"step": str(step), "shape": json.dumps(shape)})
    os.replace(partial, path)


def read_checkpoint(path: Path) -> tuple[int, dict[str, int], dict[str, torch.Tensor]]:
    """Step, shape and tensors of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return int(metadata["step"]), json.loads(metadata["shape"]), tensors


def restore(model: GPT, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Put a checkpoint's tensors back into the model and the optimizer."""
    model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, entry = name.split(".")
            state.setdefault(int(index), {})[entry] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


@torch.no_grad()
def validate(model: GPT, text: np.ndarray, context: int) -> float:
    """Mean loss over rows spread evenly over the text, shared out among the ranks. Collective."""
    starts = np.linspace(0, len(text) - context - 1, VALIDATION_ROWS).astype(np.int64)
    total = 0.0
    for part in np.split(starts, range(16, VALIDATION_ROWS, 16))[ringdl.rank() :: ringdl.size()]:
        total += model.loss(take_rows(text, part, context), reduction="sum").item()
    total = float(ringdl.allreduce(np.array([total]), op=ringdl.Sum)[0])
    return total / (VALIDATION_ROWS * context)


@torch.no_grad()
def write_text(
    model: GPT, context: int, seed: int, prompt: str = "class ", length: int = 400
) -> str:
    """Let the model continue the prompt, one sampled character after the other."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt.encode("ascii"))])
    for _ in range(length):
        odds = functional.softmax(model(text[:, -context:])[0, -1] / 0.95, dim=0)
        text = torch.cat([text, torch.multinomial(odds, 1, generator=generator)[None]], dim=1)
    written = bytes(text[0].tolist()).decode("ascii")
    return "".join(mark if mark.isprintable() or mark == "\n" else "?" for mark in written)


def digest(model: GPT) -> str:
    """A hash of all parameters' bits, as 16 hexadecimal digits."""
    result = hashlib.sha256()
    for tensor in model.state_dict().values():
        result.update(tensor.contiguous().numpy().tobytes())
    return result.hexdigest()[:16]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="length of the whole training")
    parser.add_argument("--stop-at", type=int, help="end after this step, as a job's limit would")
    parser.add_argument("--seconds", type=float, help="train no longer than this")
    parser.add_argument("--batch", type=int, default=16, help="rows per step over all ranks")
    parser.add_argument("--context", type=int, default=128, help="characters per row")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/torch_gpt.safetensors"))
    parser.add_argument(
        "--resume", action="store_true", help="continue from --checkpoint, where it exists"
    )
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--json", type=Path, help="write the final figures to this file")
    return parser.parse_args()


class Progress:
    """Figures of the steps so far, shown by rank 0: a bar on a terminal, else a line every 10 s.

    The loss shown is a mean over rank 0's rows of the steps since the last line: no communication.
    """

    def __init__(self, step: int, steps: int, batch_tokens: int) -> None:
        self.steps, self.batch_tokens = steps, batch_tokens
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.waiting: list[float] = []  # seconds of each step that were spent waiting for gradients
        self.first_shown, self.shown_at = 0, time.perf_counter()
        hide = None if ringdl.rank() == 0 else True  # None: shown where stderr is a terminal
        self.bar = tqdm(total=steps, initial=step, disable=hide, unit="step")

    def add(self, step: int, loss: float, seconds: float, waiting: float) -> None:
        """Take in a step; show it if it is time."""
        self.losses.append(loss)
        self.seconds.append(seconds)
        self.waiting.append(waiting)
        self.bar.update()
        due = time.perf_counter() - self.shown_at >= REPORT_SECONDS
        if ringdl.rank() == 0 and (due or not self.bar.disable or step == self.steps):
            recent = slice(self.first_shown, None)
            line = (
                f"loss {statistics.fmean(self.losses[recent]):.3f}, "
                f"{self.batch_tokens / statistics.fmean(self.seconds[recent]):,.0f} tokens/s, "
                f"waiting {sum(self.waiting[recent]) / sum(self.seconds[recent]):.1%}"
            )
            self.bar.set_postfix_str(line, refresh=False)
            if self.bar.disable:
                print(f"step {step}/{self.steps}: {line}", flush=True)
            if due:
                self.first_shown, self.shown_at = len(self.losses), time.perf_counter()

    def figures(self) -> dict[str, float]:
        """Median global tokens per second, and the ranks' mean waiting share. Collective."""
        self.bar.close()
        if not self.seconds:
            return {"tokens_per_second": 0.0, "waiting_share": 0.0}
        share = ringdl.allreduce(np.array([sum(self.waiting) / sum(self.seconds)]))
        median = self.batch_tokens / statistics.median(self.seconds)
        return {"tokens_per_second": median, "waiting_share": float(share[0])}


def main() -> int:
    arguments = parse_arguments()
    ringdl.init()
    rank, size = ringdl.rank(), ringdl.size()
    threads = threads_of_this_rank()
    torch.set_num_threads(threads)

    # Rank 0 reads the checkpoint and the corpus for all: no shared file system is needed.
    step, tensors = 0, {}
    if arguments.resume and rank == 0 and arguments.checkpoint.exists():
        step, shape, tensors = read_checkpoint(arguments.checkpoint)
        vars(arguments).update(shape)
    arguments, step = ringdl.broadcast_object((arguments, step))
    if arguments.batch < size:
        raise ValueError(f"a batch of {arguments.batch} rows is too small for {size} ranks")
    corpus = ringdl.broadcast_object(read_corpus() if rank == 0 else None)
    training, validation = (np.frombuffer(text, dtype=np.uint8) for text in corpus)

    torch.manual_seed(arguments.seed)
    model = GPT(arguments.layers, arguments.heads, arguments.width, arguments.context)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    if tensors:
        restore(model, optimizer, tensors)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def batch_rows(step: int) -> np.ndarray:
        stream = np.random.default_rng([arguments.seed, step])
        return stream.integers(len(training) - arguments.context, size=arguments.batch)

    def save() -> None:
        if rank == 0:
            shape = {name: getattr(arguments, name) for name in SHAPE}
            save_checkpoint(arguments.checkpoint, model, optimizer, step, shape)

    if rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"{count / 1e6:.2f} M parameters, {len(training) / 1e6:.1f} M characters; "
            f"ranks: {size}, threads of each: {threads}; from step {step}",
            flush=True,
        )
    first_step, last_step = step, min(arguments.steps, arguments.stop_at or arguments.steps)
    figures = Progress(step, arguments.steps, arguments.batch * arguments.context)
    started = time.perf_counter()
    while step < last_step:
        step_started, waited = time.perf_counter(), ringdl.stats()["wait_seconds"]
        progress = (step + 1) / arguments.steps
        if arguments.seconds:  # clocks differ from rank to rank: all use the latest
            spent = np.array([(step_started - started) / arguments.seconds])
            spent = float(ringdl.allreduce(spent, op=ringdl.Max)[0])
            if spent >= 1:
                break
            progress = max(progress, spent)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, arguments.batch)

        rows = batch_rows(step)[rank::size]
        weight = len(rows) * size / arguments.batch  # 1 where the number of ranks divides the batch
        optimizer.zero_grad()
        loss = model.loss(take_rows(training, rows, arguments.context))
        (weight * loss).backward()  # on return the gradients are averages over all ranks
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        step += 1
        seconds = time.perf_counter() - step_started
        figures.add(step, loss.item(), seconds, ringdl.stats()["wait_seconds"] - waited)
        if step % arguments.save_every == 0 and step < last_step:
            save()
    save()

    validation_loss = validate(model, validation, arguments.context)
    summary = {
        "validation_loss": validation_loss,
        **figures.figures(),
        "first_step": first_step,
        "steps": step,
        "ranks": size,
        "threads": threads,
        "digest": digest(model),
    }
    everyones = ringdl.allgather(np.frombuffer(bytes.fromhex(summary["digest"]), np.uint8)[None])
    are_equal = bool((everyones == everyones[0]).all())
    if rank == 0:
        print(write_text(model, arguments.context, arguments.seed))
        print(
            f"validation loss {validation_loss:.4f} nats per character at step {step}; "
            f"{summary['tokens_per_second']:,.0f} tokens/s (median), "
            f"waiting {summary['waiting_share']:.1%}; saved in {arguments.checkpoint}"
        )
        if are_equal:
            ranks = f"all {size} ranks hold" if size > 1 else "the only rank holds"
            print(f"{ranks} the same bits: {summary['digest']}")
        else:
            print("the ranks' bits differ:", *(row.tobytes().hex() for row in everyones))
        if arguments.json:
            arguments.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
