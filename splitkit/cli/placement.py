"""Reads the options of a placement (devices or stages, memory, links, schedule), and makes the policy for them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from splitkit.cli.syntax import device_list
from splitkit.cli.syntax.device_list import DeviceList
from splitkit.errors import UsageError
from splitkit.pipeline.schedules import schedule_named
from splitkit.units import read_percent, read_size, size

if TYPE_CHECKING:
    from splitkit.plans.policy import Policy
    from splitkit.prices import Optimizer

MOST_BYTES = 2**70
"""The largest ``--memory``."""
OPTIONS = (
    "devices",
    "schedule",
    "microbatches",
    "links",
    "replicas",
    "optimizer",
    "objective",
    "tokens",
    "chunk",
    "trace",
    "order",
)
"""The options that only a placement has; not ``--memory``, which has another meaning with ``--what fwd-bwd``."""


def refuse_with(args: Namespace, what: str, remedy: str, names: tuple[str, ...] = OPTIONS) -> None:
    """Refuse options that do not go with ``what``.

    Raises:
        UsageError: SK601.
    """
    for name in names:
        if getattr(args, name) is not None:
            raise UsageError("SK601", f"--{name} cannot be combined with {what}", remedy)


def check_placement(args: Namespace) -> None:
    """Refuse options that do not go together, before torch is imported.

    Raises:
        UsageError: SK601.
    """
    if args.policy is not None:
        remedy = "Give it to the policy: --policy \"Stages(4, schedule='1f1b')\"; or leave --policy out."
        refuse_with(args, "--policy", remedy, (*OPTIONS, "memory"))
    if args.devices is not None and args.stages is not None:
        raise UsageError(
            "SK601",
            "--devices and --stages both give the number of stages",
            "Leave --stages out; or give --stages with --costs roofline:h200 --links nvlink4 in place of --devices.",
        )
    if args.devices is None and args.stages is None:
        name = next(name for name in (*OPTIONS, "memory") if getattr(args, name) is not None)
        remedy = "Add --devices 4xh200 or --stages 4."
        if name == "memory":
            remedy = f"{remedy} With --what fwd-bwd, --memory limits the peak of a training step."
        raise UsageError("SK601", f"--{name} needs devices or stages", remedy)
    for name in ("microbatches", "trace", "order"):
        if getattr(args, name) is not None and args.schedule is None:
            raise UsageError("SK601", f"--{name} needs --schedule", "Add --schedule 1f1b.")
    if args.objective == "latency" and args.devices is None:
        remedy = "Add --devices 4xh200 in place of --stages."
        raise UsageError("SK601", "--objective latency needs --devices", remedy)
    _check_inference(args)
    if args.schedule is not None and args.objective == "latency":
        raise UsageError("SK601", "--schedule is for throughput", "Leave out --schedule or --objective latency.")
    if args.schedule is not None and args.optimizer == "none":
        raise UsageError(
            "SK601", "--schedule is for training, --optimizer none for inference", "Leave one of them out."
        )
    if args.training and args.optimizer == "none":
        remedy = "Leave one of them out."
        raise UsageError("SK601", "--training prices backward, --optimizer none is for inference", remedy)
    if args.devices is not None:
        device_list.read_device_list(args.devices)
    if args.memory is None or "," not in args.memory:
        check_memory(args)
        return
    for one in args.memory.split(","):
        check_memory(Namespace(memory=one, devices=None), least=False)


def _check_inference(args: Namespace) -> None:
    """Refuse a cache with options of training, and with objectives that do not count it."""
    given = "--objective tokens" if args.objective == "tokens" else "--tokens"
    if args.objective != "tokens" and args.tokens is None:
        if args.chunk is not None:
            remedy = "Add --objective tokens, or --tokens N."
            raise UsageError("SK601", "--chunk needs a number of tokens for which there must be room", remedy)
        return
    if args.tokens is not None and args.objective in ("tokens", "latency"):
        remedy = "Leave --tokens out, or --objective: --tokens asks for the fastest stages with room for so many."
        raise UsageError("SK601", f"--tokens cannot be combined with --objective {args.objective}", remedy)
    trains = args.optimizer not in (None, "none") or args.schedule is not None or args.training or args.replicas
    if trains:
        remedy = "Leave --schedule, --optimizer, --training and --replicas out."
        raise UsageError("SK601", f"{given} is for inference only", remedy)
    if args.memory == "least":
        raise UsageError("SK601", f"--memory least cannot be combined with {given}", "Give a size: --memory 24GiB.")


def check_memory(args: Namespace, least: bool = True) -> None:
    """Refuse a ``--memory`` that cannot be read, before torch is imported.

    Args:
        args: the arguments, of which ``memory`` and ``devices`` are read.
        least: whether the word ``least`` is allowed.

    Raises:
        UsageError: SK601.
    """
    if args.memory is None or (least and args.memory == "least"):
        return
    if "%" in args.memory:
        if not read_percent(args.memory):
            raise UsageError(
                "SK601", f"--memory {args.memory:.60} is not a share", "Write a share above 0%, such as 80%."
            )
        if args.devices is None:
            remedy = "Name the devices whose memory it is a share of, such as --devices 4xh200; or write bytes: 80GiB."
            raise UsageError("SK601", f"--memory {args.memory} is a share, but no device is named", remedy)
    elif (found := read_size(args.memory)) is None or found > MOST_BYTES:
        raise UsageError(
            "SK601", f"--memory {args.memory:.60} is not a size", "Write bytes, 80GiB, or 80% with --devices."
        )


def memory_option(args: Namespace, devices: DeviceList | None) -> int | str | tuple[int, ...] | None:
    """Return a checked ``--memory``.

    That is the bytes of every device; of each device for a list, and for a share of unequal devices; ``"least"``, or
    ``None`` if the option is not given.
    """
    if args.memory is None or args.memory == "least":
        memory: str | None = args.memory
        return memory
    if "," in args.memory:
        return tuple(read_size(one) or 0 for one in args.memory.split(","))
    share = read_percent(args.memory)
    if share is None:
        return read_size(args.memory)
    assert devices is not None
    each = tuple(int(share * device.memory) for device in devices.devices)
    return each[0] if devices.alike else each


@dataclass(frozen=True)
class Placement:
    """The placement that the options ask for.

    Attributes:
        devices: the devices; ``None`` if only a number of stages is given.
        stages: the number of stages; ``None`` for unequal devices, and for the objective ``"latency"``.
        schedule: the pipeline schedule; ``None`` for inference.
        microbatches: the number of microbatches in a step; ``None`` for the policy's default.
        memory: the memory limit of all devices or of each, in bytes, or ``"least"``; ``None`` if not given.
        links: the name of a preset of links.
        links_from: where `links` comes from, in words.
        optimizer: the optimizer whose state takes memory; ``None`` for inference.
        objective: ``"throughput"``, ``"latency"`` or ``"tokens"``.
        replicas: the numbers of replicas that a stage may have; ``stages`` is then the number of devices.
        tokens: the tokens of cache for which there must be room.
        chunk: the most new tokens of a step.
    """

    devices: DeviceList | None
    stages: int | None
    schedule: str | None
    microbatches: int | None
    memory: int | str | tuple[int, ...] | None
    links: str | None
    links_from: str
    optimizer: Optimizer
    objective: str
    replicas: tuple[int, ...] = (1,)
    tokens: int = 0
    chunk: int = 1

    @classmethod
    def of(cls, args: Namespace) -> Placement:
        """Return the placement that checked arguments ask for.

        Raises:
            UsageError: SK601 for unequal devices with options that need equal ones.
            SplitError: for unknown devices, links and schedules.
        """
        devices = None if args.devices is None else device_list.read_device_list(args.devices)
        if devices is not None and not devices.alike:
            _require_alike(args, devices)
        objective = args.objective or "throughput"
        stages = args.stages
        if devices is not None and devices.alike and objective != "latency":
            a_rank = 1 if args.schedule is None else schedule_named(args.schedule).usual_stages_per_rank
            stages = len(devices.devices) * a_rank
        if stages is None and args.memory == "least":
            remedy = "Name one kind of device, 4xh200, or give --stages 4; leave --objective latency out."
            raise UsageError("SK601", "--memory least needs stages on devices of one kind", remedy)
        if stages is None and args.replicas is not None:
            remedy = "Name one kind of device, 8xh200, or give --stages 8; leave --objective latency out."
            raise UsageError("SK601", "--replicas needs stages on devices of one kind", remedy)
        links, why = links_option(args.links, devices)
        trains = args.schedule is not None or bool(args.training)
        optimizer = args.optimizer or ("adam" if trains else "none")
        return cls(
            devices=devices,
            stages=stages,
            schedule=args.schedule,
            microbatches=_microbatches(args, stages),
            memory=memory_option(args, devices),
            links=links,
            links_from=why,
            optimizer=None if optimizer == "none" else cast("Optimizer", optimizer),
            objective=objective,
            replicas=args.replicas or (1,),
            tokens=args.tokens or 0,
            chunk=args.chunk or 1,
        )

    def policy(self) -> Policy:
        """Return `Stages` for devices of one kind, else `Devices`."""
        from splitkit.policies import Devices, Stages

        if self.stages is not None:
            memory = self.memory
            if memory is None and self.devices is not None:
                memory = self.devices.devices[0].memory
            options = self.schedule, self.microbatches, memory, self.links, self.optimizer
            if self.objective == "tokens" or self.tokens:
                return Stages(self.stages, *options, objective=self.objective, tokens=self.tokens, chunk=self.chunk)
            return Stages(self.stages, *options, replicas=self.replicas)
        assert self.devices is not None
        given = list(self.devices.devices)
        return Devices(given, self.memory, self.links, self.objective, optimizer=self.optimizer, tokens=self.tokens)

    def limit(self, rank: int) -> int | None:
        """Return the memory limit of a rank in bytes, or ``None`` for no limit."""
        if isinstance(self.memory, int):
            return self.memory
        if self.devices is None:
            return self.memory[rank] if isinstance(self.memory, tuple) else None
        device = self.devices.devices[rank]
        is_cpu = device.is_cpu and not self.devices.alike  # beside accelerators, main memory is no limit
        limit = self.memory[rank] if isinstance(self.memory, tuple) else device.memory
        return None if is_cpu else limit

    def to_dict(self) -> dict[str, Any]:
        """Return the placement as plain data."""
        as_given = ("stages", "schedule", "microbatches", "memory", "links", "optimizer", "objective")
        return {
            "devices": None if self.devices is None else [device.name for device in self.devices.devices],
            **{name: getattr(self, name) for name in as_given},
            "tokens": self.tokens or None,
            "replicas": self.replicas,
        }

    def facts(self) -> dict[str, str]:
        """Return the placement as names and texts."""
        rows = {} if self.devices is None else {"devices": str(self.devices)}
        if self.devices is None or self.devices.alike or self.memory is not None:
            limit = self.limit(0)
            rows["memory"] = "no limit" if limit is None else f"{size(limit)} per device"
        if isinstance(self.memory, tuple):
            rows["memory"] = ", ".join(map(size, self.memory))
        if self.memory == "least":
            rows["memory"] = "as little as possible"
        rows["links"] = f"{self.links or 'none'}{self.links_from}"
        rows["purpose"] = f"training with {self.optimizer}" if self.optimizer else "inference"
        return rows


def links_option(given: str | None, devices: DeviceList | None) -> tuple[str | None, str]:
    """Return the name of the links, ``None`` for none, and where it comes from, in words."""
    if given is not None:
        return None if given == "none" else given, ""
    if devices is None:
        return None, ": transfers are free (--links nvlink4 prices them)"
    if devices.links is not None:
        return devices.links, ", from the file"
    return devices.usual_links, f", usual for {devices.kinds} (--links changes it)"


def _microbatches(args: Namespace, stages: int | None) -> int | None:
    """Return the number of microbatches; with replicas 2 per device, as the number of stages is not known yet."""
    if args.microbatches is None and args.replicas is not None and args.schedule is not None and stages is not None:
        return 2 * stages
    found: int | None = args.microbatches
    return found


def _require_alike(args: Namespace, devices: DeviceList) -> None:
    if args.schedule is not None:
        raise UsageError(
            "SK601",
            f"--schedule {args.schedule} needs devices of one kind, and these are {devices}",
            "Leave --schedule out: unequal devices are planned for throughput or latency. Or name one kind, 4xh200.",
        )
    for name in ("costs", "training"):
        if getattr(args, name) is not None:
            raise UsageError(
                "SK601",
                f"--{name} gives each node one price, but these devices differ: {devices}",
                f"Leave --{name} out: each device has the prices of its roofline; --optimizer adam adds backward.",
            )
    instead = "Name one kind, 2xrtx-3090, or give --stages 2 --memory 24GiB,16GiB"
    if args.objective == "tokens":
        raise UsageError(
            "SK601", "the largest cache is planned for devices of one kind", f"{instead}; or use --tokens N."
        )
    if args.chunk is not None:
        raise UsageError("SK601", "--chunk is for devices of one kind", f"{instead}; or leave --chunk out.")
