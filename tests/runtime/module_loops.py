"""One rank: training loops of others around a pipeline as a module; without ranks: the same around the model."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from capturedmodels import stored
from torch import fx, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

import splitkit as sk
from splitkit.errors import PipelineError
from splitkit.runtime import PipelineModule, pipeline

ROWS, MICROBATCHES = 8, 4


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    made = GPT2LMHeadModel(GPT2Config(**sizes, **drop, bos_token_id=0, eos_token_id=0, use_cache=False))
    made.accepts_loss_kwargs = False  # else Trainer has it count labels, of which the first of a row is none
    return made


def data(rows: int = 32, kept_labels: bool = False) -> list[dict[str, torch.Tensor]]:
    """Rows of 8 tokens; of some labels, only the last ones are kept."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 61, (rows, 8), generator=generator)
    first = [number % 7 if kept_labels else 0 for number in range(rows)]
    return [
        {"input_ids": row, "labels": row.masked_fill(torch.arange(8) < n, -100)}
        for n, row in zip(first, ids, strict=True)
    ]


CAPTURED: list[fx.GraphModule] = []
"""In training mode and in evaluation, with one set of weights."""


def prepare() -> None:
    """Capture once for all ranks."""
    torch.set_num_threads(1)
    whole, example = model(), {k: torch.stack([v] * (ROWS // MICROBATCHES)) for k, v in data()[0].items()}
    counts: tuple[dict[str, torch.Tensor], ...] = ({}, {"num_items_in_batch": torch.tensor(5)})
    CAPTURED.extend(
        stored(
            Path(__file__).read_text(),
            lambda: [sk.capture(whole.train(mode), **example, **more) for more in counts for mode in (True, False)],
        )
    )


def piped(*, counts: bool = False) -> PipelineModule:
    training, evaluating = copy.deepcopy(CAPTURED[2 * counts : 2 * counts + 2])
    split = sk.split(training, sk.policies.Stages(dist.get_world_size()), costs=sk.costs.unit(training))
    pipe = pipeline(split, "1f1b", MICROBATCHES, reduction="sum" if counts else "mean")
    return PipelineModule(pipe, pipe.evaluation(evaluating))


def counted(net: nn.Module) -> list[float]:
    """Trainer's own loss: the sum over the kept labels of all accumulated batches, over their number."""
    if isinstance(net, PipelineModule):
        net.loss_type = model().loss_type  # by which Trainer counts
    else:
        del net.accepts_loss_kwargs
    return trainer(net, kept_labels=True)


def trainer(net: nn.Module, *, kept_labels: bool = False) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=ROWS, per_device_eval_batch_size=ROWS,
            gradient_accumulation_steps=2, num_train_epochs=2, learning_rate=1e-2, logging_steps=1, report_to=[],
            use_cpu=True, max_grad_norm=0, disable_tqdm=True, save_strategy="no", eval_strategy="epoch",
            prediction_loss_only=True, remove_unused_columns=False, label_names=["labels"],
        )  # fmt: skip
        run = Trainer(
            model=net, args=arguments, train_dataset=data(32, kept_labels), eval_dataset=data(16, kept_labels)
        )
        run.remove_callback(PrinterCallback)
        run.train()
    return [row[key] for row in run.state.log_history for key in ("loss", "eval_loss") if key in row]


def accelerated(net: nn.Module) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = DataLoader(data(), batch_size=ROWS)
    net, optimizer, loader, schedule = accelerator.prepare(net.train(), optimizer, loader, schedule)
    losses = []
    for batch in [*loader, *loader]:
        with accelerator.accumulate(net):
            loss = net(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def plain(net: nn.Module) -> list[float]:
    """Losses that are kept, scaled, and propagated backward later and in another order."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.5), []
    batches = [{k: torch.stack([row[k] for row in data()[i : i + ROWS]]) for k in data()[0]} for i in (0, 8, 16, 24)]
    net.train()
    for first, second, third in (batches[:3], batches[1:]):
        found = [net(**batch)["loss"] for batch in (first, second, third)]
        (found[1] * 0.25).backward()
        (found[0] / 3).backward()  # the third never is
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item() for loss in found]
    return losses


def misused(net: PipelineModule) -> list[str]:
    bare, said = PipelineModule(net.pipe), list[str]()
    batch = {k: torch.stack([row[k] for row in data()[:ROWS]]) for k in data()[0]}
    loss = net.train()(**batch)["loss"]
    loss.backward(retain_graph=True)
    for wrong in (lambda: bare.eval()(**batch), loss.backward):
        try:
            wrong()
        except PipelineError as error:
            said.append(error.code)
    return said


def clipped(net: nn.Module) -> list[float]:
    """The loop of the page with a pipeline, and accelerate's own clipping with the model."""
    if isinstance(net, PipelineModule):
        page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
        code = re.search(r"```python\n# clip\.py\n(.*?)```", page, re.DOTALL)[1]
        losses = list[float]()
        names = {"torch": torch, "net": net, "data": data(), "losses": losses}
        exec(code.replace("optimizer.step()", "optimizer.step(); losses.append(loss.item())"), names)
        return losses
    accelerator, losses = Accelerator(cpu=True, gradient_accumulation_steps=2), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net, optimizer, loader = accelerator.prepare(net.train(), optimizer, DataLoader(data(), batch_size=ROWS))
    for batch in loader:
        with accelerator.accumulate(net):
            loss = net(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


LOOPS: dict[str, Any] = {
    "trainer": trainer,
    "counted": counted,
    "accelerated": accelerated,
    "plain": plain,
    "clipped": clipped,
}


def main() -> None:
    dist.init_process_group("gloo", os.environ["SPLITKIT_STORE"], rank=int(os.environ["RANK"]), world_size=2)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    for name in sys.argv[1:]:
        net = piped(counts=name == "counted")
        losses = LOOPS[name](net)
        weights = {name: t.double().abs().sum().item() for name, t in net.pipe.named_parameters().items()}
        print(json.dumps({"rank": dist.get_rank(), "loop": name, "losses": losses, "weights": weights}), flush=True)
    print(json.dumps({"rank": dist.get_rank(), "misused": misused(piped())}), flush=True)
    dist.destroy_process_group()
